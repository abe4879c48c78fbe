"""Rewards: golden values, case B02, and the shortcut through products against whitened embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.core.advantages import compute_advantages
from openrlhf_ebft.core.gram import group_gram, unit_rows
from openrlhf_ebft.core.rewards import (
    add_function_values,
    compute_rewards,
    compute_rewards_from_embeddings,
    get_alignment_rewards,
    get_diversity_rewards,
)
from openrlhf_ebft.core.whitening import whiten_embeddings_batched


@pytest.fixture
def golden() -> dict[str, torch.Tensor]:
    file = np.load(Path(__file__).parents[1] / "golden" / "rewards.npz")
    return {key: torch.from_numpy(np.asarray(value)) for key, value in file.items()}


def test_golden(golden):
    n = int(golden["num_generations"])
    gt = golden["gt"].repeat_interleave(n, 0)
    torch.testing.assert_close(get_alignment_rewards(golden["gen"], gt), golden["alignment"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(get_diversity_rewards(golden["gen"], n), golden["diversity"], atol=1e-5, rtol=1e-5)
    assert torch.equal(get_diversity_rewards(golden["gen"], 1), golden["diversity_single"])


def test_leading_axes_equal_flat_rows(golden):
    n = int(golden["num_generations"])
    groups, gt = golden["gen"].unflatten(0, (-1, n)), golden["gt"].unsqueeze(1)
    torch.testing.assert_close(get_alignment_rewards(groups, gt).flatten(), golden["alignment"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(get_diversity_rewards(groups, n).flatten(), golden["diversity"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("whitening", "expected"),
    [("feature", [0.707107, 0.707107]), ("sample", [3 / 13, 4 / 13]), ("none", [3 / 13, 4 / 13])],
)
def test_case_b02(whitening, expected):
    phi, gt = torch.tensor([[3.0, 0, 0], [0, 4, 0]]), torch.tensor([3.0, 4, 12])
    rewards = compute_rewards_from_embeddings(phi, gt, whitening=whitening)
    torch.testing.assert_close(rewards.alignment, torch.tensor(expected).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(rewards.raw_alignment, torch.tensor([3 / 13, 4 / 13]).double(), atol=1e-6, rtol=0)
    assert rewards.diversity.tolist() == [0, 0]


@pytest.mark.parametrize("whitening", ["feature", "sample", "none"])
@pytest.mark.parametrize(("n", "dim"), [(1, 6), (2, 40), (4, 40), (6, 4)])
def test_products_give_the_rewards_of_the_embeddings(whitening, n, dim):
    torch.manual_seed(0)
    phi, gt = torch.randn(3, 5, n, dim), torch.randn(3, 5, dim)
    if n > 2:
        phi[0, 0, 1] = phi[0, 0, 0]
        phi[0, 1] = 0
        gt[0, 2] = 0
    rewards = compute_rewards(group_gram(phi, gt), alignment_coef=0.7, diversity_coef=0.4, whitening=whitening)
    white, white_gt = phi.double(), gt.double().unsqueeze(-2)
    if whitening == "none":
        white = unit_rows(white)
    else:
        white, white_gt = whiten_embeddings_batched(white, white_gt, space=whitening)
    alignment = get_alignment_rewards(white, white_gt.expand_as(white))
    diversity = get_diversity_rewards(white, n)
    torch.testing.assert_close(rewards.alignment, alignment, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rewards.diversity, diversity, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rewards.reward, 1.4 * alignment - 0.8 * diversity, atol=1e-6, rtol=1e-6)


def test_zero_and_collinear_groups_give_zero_not_noise():
    phi = torch.zeros(3, 2, 30)
    phi[1] = torch.randn(30, generator=torch.Generator().manual_seed(0))
    phi[2, 0, 0] = phi[2, 1, 1] = 1
    gt = torch.zeros(3, 30)
    gt[:, 29] = 5.0
    for whitening in ("feature", "sample", "none"):
        rewards = compute_rewards_from_embeddings(phi, gt, whitening=whitening)
        assert rewards.alignment[0].tolist() == [0, 0]
        assert rewards.alignment[2].tolist() == [0, 0]  # the ground truth is orthogonal to the group
        assert rewards.diversity[0].tolist() == [0, 0]
        expected = 0.5 if whitening != "none" else 1.0  # two equal rows share one whitened direction
        torch.testing.assert_close(rewards.diversity[1], torch.full((2,), expected).double(), atol=1e-6, rtol=0)


def test_neighbours_of_a_zero_group_are_untouched():
    torch.manual_seed(2)
    phi, gt = torch.randn(3, 4, 30), torch.randn(3, 30)
    right = compute_rewards_from_embeddings(phi[::2], gt[::2])
    phi[1] = 0
    rewards = compute_rewards_from_embeddings(phi, gt)
    for field in ("alignment", "diversity", "reward", "raw_alignment", "cfm", "cfm_unbiased"):
        assert torch.equal(getattr(rewards, field)[::2], getattr(right, field))


def test_no_groups_give_no_rewards():
    rewards = compute_rewards_from_embeddings(torch.ones(0, 4, 8), torch.ones(0, 8))
    assert rewards.reward.shape == (0, 4)
    assert rewards.cfm.shape == (0,)
    assert whiten_embeddings_batched(torch.ones(0, 4, 8), torch.ones(0, 1, 8))[1].shape == (0, 1, 8)


def test_non_finite_group_is_named():
    phi, gt = torch.randn(4, 3, 8), torch.randn(4, 8)
    phi[2, 1, 5] = torch.nan
    for whitening in ("feature", "sample", "none"):
        with pytest.raises(ValueError, match=r"group 2 \(1 of 4"):
            compute_rewards_from_embeddings(phi, gt, whitening=whitening)


def test_same_input_same_output():
    torch.manual_seed(3)
    phi, gt = torch.randn(16, 4, 100), torch.randn(16, 100)
    first, second = (compute_rewards_from_embeddings(phi, gt).reward for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_is_kept_and_no_graph(dtype):
    torch.manual_seed(4)
    gen, gt = torch.randn(6, 20).to(dtype).requires_grad_(), torch.randn(6, 20).to(dtype).requires_grad_()
    alignment, diversity = get_alignment_rewards(gen, gt), get_diversity_rewards(gen, 3)
    assert alignment.dtype == diversity.dtype == dtype
    assert not alignment.requires_grad
    assert not diversity.requires_grad
    exact = get_alignment_rewards(gen.detach().double(), gt.detach().double())
    torch.testing.assert_close(alignment.double(), exact, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
    exact = get_diversity_rewards(gen.detach().double(), 3)
    torch.testing.assert_close(diversity.double(), exact, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)
    assert not compute_rewards_from_embeddings(gen.view(2, 3, 20), gt[:2]).reward.requires_grad


def test_non_finite_rows_stay_in_their_own_group():
    gen, gt = torch.ones(4, 3), torch.ones(4, 3)
    gen[0, 0] = torch.nan
    assert get_alignment_rewards(gen, gt).isnan().tolist() == [True, False, False, False]
    assert get_diversity_rewards(gen, 2).isnan().tolist() == [True, True, False, False]


def test_bad_input_states_both_numbers():
    gen = torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"6 rows.*num_generations = 4"):
        get_diversity_rewards(gen, 4)
    with pytest.raises(ValueError, match=r"2 rollouts.*is 3"):
        get_diversity_rewards(gen.view(3, 2, 4), 3)
    with pytest.raises(ValueError, match=r"\(6, 4\) and 0"):
        get_diversity_rewards(gen, 0)
    with pytest.raises(ValueError, match=r"\(6, 4\) and \(2, 4\)"):
        get_alignment_rewards(gen, gen[:2])
    with pytest.raises(ValueError, match=r"\(6, 4\) and \(1, 4\)"):
        get_alignment_rewards(gen, gen[:1])
    with pytest.raises(ValueError, match="gt_embedding.*int64"):
        get_alignment_rewards(gen, gen.long())
    gram = group_gram(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match="whitening.*'pca'"):
        compute_rewards(gram, whitening="pca")
    with pytest.raises(ValueError, match=r"N\+1, N\+1.*\(2, 3\)"):
        compute_rewards(gram[:2])
    with pytest.raises(ValueError, match=r"whiten_tol.*1e-06.*1e-09"):
        compute_rewards(gram, whiten_tol=1e-9)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_simple", "group_norm", "dr_grpo", "reinforce"])
def test_function_values_enter_rewards_and_advantages(estimator):
    """With both other coefficients 0 the function is the reward; otherwise the advantages of rewards add up."""
    torch.manual_seed(0)
    gram = group_gram(torch.randn(3, 4, 6), torch.randn(3, 6))
    values = torch.randn(3, 4, dtype=torch.float64)
    alone = add_function_values(compute_rewards(gram, alignment_coef=0, diversity_coef=0), values, 2.0)
    torch.testing.assert_close(alone.reward, 2 * values)
    simple = {"rloo": "rloo_simple"}.get(estimator, estimator)
    torch.testing.assert_close(compute_advantages(alone, estimator), compute_advantages(2 * values, simple))
    plain = compute_rewards(gram)
    both = add_function_values(plain, values, 0.5)
    torch.testing.assert_close(both.reward, plain.reward + 0.5 * values)
    if estimator != "group_norm":
        expected = compute_advantages(plain, estimator) + compute_advantages(0.5 * values, simple)
        torch.testing.assert_close(compute_advantages(both, estimator), expected)


@pytest.mark.parametrize("values", [torch.zeros(3), torch.full((1, 4), float("nan"))])
def test_function_values_must_fit_and_be_finite(values):
    rewards = compute_rewards(group_gram(torch.randn(1, 4, 6), torch.randn(1, 6)))
    with pytest.raises(ValueError, match=r"need \(1, 4\) finite values, got"):
        add_function_values(rewards, values, 1.0)
