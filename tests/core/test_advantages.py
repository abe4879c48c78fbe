"""Advantage estimators: golden values, cases B03 and B60, closed forms."""

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.core.advantages import ESTIMATORS, compute_advantages
from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.rewards import GroupRewards, compute_rewards

NAN = float("nan")


def group_rewards(alignment, diversity, alignment_coef, diversity_coef) -> GroupRewards:
    reward = 2 * alignment_coef * alignment - 2 * diversity_coef * diversity
    unused = torch.zeros(alignment.shape[:-1])
    return GroupRewards(alignment, diversity, reward, alignment, unused, unused, alignment_coef, diversity_coef)


@pytest.mark.parametrize("n", [2, 4])
def test_rloo_golden(n):
    file = np.load(Path(__file__).parents[1] / "golden" / f"rloo_baseline_n{n}.npz")
    by_group = {
        key: torch.from_numpy(file[key]).unflatten(1, (2, n)).transpose(-1, -2)
        for key in ("alignment_x2", "diversity_x2", "reward", "baseline", "advantage")
    }
    coefs = float(file["alignment_coef"]), float(file["diversity_coef"])
    rewards = group_rewards(by_group["alignment_x2"] / 2, by_group["diversity_x2"] / 2, *coefs)
    torch.testing.assert_close(rewards.reward, by_group["reward"], atol=1e-5, rtol=1e-5)
    advantages = compute_advantages(rewards, "rloo")
    torch.testing.assert_close(advantages, by_group["advantage"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rewards.reward - advantages, by_group["baseline"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_simple"])
def test_case_b03(estimator):
    advantages = compute_advantages(torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]), estimator)
    torch.testing.assert_close(advantages, torch.tensor([5 / 7] * 3 + [-3 / 7] * 5), atol=1e-6, rtol=0)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_simple"])
def test_case_b60_one_nan(estimator):
    assert compute_advantages(torch.tensor([1, NAN, 3, 5]), estimator).tolist() == [-3, 0, 0, 3]
    assert compute_advantages(torch.tensor([NAN, 2.0, NAN, float("inf")]), estimator).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_b60_never_nan(estimator):
    rewards = torch.tensor([[1, NAN, 3, 5], [NAN, 7, NAN, NAN], [NAN] * 4, [0.5] * 4, [0.1] * 4])
    advantages = compute_advantages(rewards, estimator)
    assert advantages.isfinite().all()
    assert (advantages[rewards.isnan()] == 0).all()
    if estimator != "reinforce":
        assert (advantages[1:] == 0).all()
    alone = compute_advantages(torch.tensor([1.0, 3, 5]), estimator)
    torch.testing.assert_close(advantages[0, [0, 2, 3]], alone)


def test_closed_forms():
    rewards = torch.tensor([1.0, 2, 6])
    assert compute_advantages(rewards, "dr_grpo").tolist() == [-2, -1, 3]
    assert compute_advantages(rewards, "rloo_simple").tolist() == [-3, -1.5, 4.5]
    torch.testing.assert_close(compute_advantages(rewards, "group_norm"), torch.tensor([-2.0, -1, 3]) / 7**0.5)
    assert compute_advantages(rewards, "reinforce").tolist() == [1, 2, 6]


def test_rloo_leaves_sample_j_out_of_both_terms():
    """The baseline of sample j is the same whatever sample j is."""
    torch.manual_seed(0)
    phi, gt = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    baselines = {}
    for estimator in ("rloo", "rloo_simple"):
        found = []
        for other in (phi[0], torch.randn(8, dtype=torch.float64)):
            rewards = compute_rewards(group_gram(torch.stack([other, *phi[1:]]), gt), whitening="none")
            found.append((rewards.reward - compute_advantages(rewards, estimator))[0])
        baselines[estimator] = abs(found[0] - found[1]).item()
    assert baselines["rloo"] < 1e-12
    assert baselines["rloo_simple"] > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_is_kept_and_no_graph(dtype):
    advantages = compute_advantages(torch.tensor([1.0, 2, 6]).to(dtype).requires_grad_(), "dr_grpo")
    assert advantages.dtype == dtype
    assert not advantages.requires_grad
    assert advantages.tolist() == [-2, -1, 3]


@pytest.mark.parametrize("value", [0.1, 1e8 + 0.1, 1e20 / 3])
def test_equal_rewards_are_no_spread_to_divide_by(value):
    """B60: a constant group; the rounding of its mean is not the size of a reward (1e20 / 3: 65536)."""
    rewards = torch.full((7,), value, dtype=torch.float64)
    rewards[2] = torch.nan
    assert compute_advantages(rewards, "group_norm").tolist() == [0] * 7


def test_single_sample_and_bad_input():
    assert compute_advantages(torch.tensor([2.0]), "reinforce").tolist() == [2]
    for estimator in ("rloo", "rloo_simple", "group_norm", "dr_grpo"):
        with pytest.raises(ValueError, match=r"n >= 2.*n = 1.*reinforce"):
            compute_advantages(torch.tensor([[2.0]]), estimator)
    with pytest.raises(ValueError, match="unknown estimator 'grpo', known: rloo"):
        compute_advantages(torch.ones(3), "grpo")
    with pytest.raises(ValueError, match="int64"):
        compute_advantages(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="at least 1"):
        compute_advantages(torch.ones(2, 0))
