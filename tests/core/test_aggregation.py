"""The aggregator: order and replicas do not matter, missing samples are named, statistics are exact."""

import itertools
import logging

import pytest
import torch

from openrlhf_ebft.core.advantages import compute_advantages
from openrlhf_ebft.core.aggregation import MissingSamples, RewardAggregator
from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.rewards import compute_rewards

IDS = [("doc", anchor) for anchor in range(5)]


def grams(groups: int = 5, n: int = 4, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return group_gram(torch.randn(groups, n, 12), torch.randn(groups, 12))


def expected(n: int = 4) -> dict:
    return dict.fromkeys(IDS, n)


@pytest.mark.parametrize("whitening", ["feature", "sample", "none"])
def test_order_and_replicas_do_not_matter(whitening):
    gram = grams()
    results = []
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        for cut in (0, 2, 5):  # which groups which replica sends, in one call or several
            aggregator = RewardAggregator(whitening=whitening, diversity_coef=0.5)
            aggregator.start(7, expected())
            for part in (order[:cut], order[cut:]):
                if part:
                    aggregator.add(7, [IDS[i] for i in part], gram[list(part)])
            results.append(aggregator.finish(7))
    first = results[0]
    assert list(first.advantages) == IDS
    for other in results[1:]:
        assert other.statistics == first.statistics
        assert list(other.advantages) == IDS
        assert all(torch.equal(other.advantages[group], first.advantages[group]) for group in IDS)
        assert all(torch.equal(other.rewards[group], first.rewards[group]) for group in IDS)


def test_equals_the_functions_over_the_whole_step():
    gram = grams()
    aggregator = RewardAggregator(whitening="none", diversity_coef=0.3, alignment_coef=2.0, estimator="rloo_simple")
    aggregator.start(0, expected())
    aggregator.add(0, IDS, gram)
    result = aggregator.finish(0)
    rewards = compute_rewards(gram, whitening="none", diversity_coef=0.3, alignment_coef=2.0)
    advantages = compute_advantages(rewards, "rloo_simple")
    torch.testing.assert_close(torch.stack(list(result.advantages.values())), advantages.float())
    torch.testing.assert_close(torch.stack(list(result.rewards.values())), rewards.reward.float())
    statistics = result.statistics
    assert statistics.alignment == pytest.approx(rewards.alignment.mean().item())
    assert statistics.diversity == pytest.approx(rewards.diversity.mean().item())
    assert statistics.reward_mean == pytest.approx(rewards.reward.mean().item())
    assert statistics.reward_std == pytest.approx(rewards.reward.std().item())
    assert statistics.raw_alignment == pytest.approx(rewards.raw_alignment.mean().item())
    assert statistics.cfm == pytest.approx(rewards.cfm.mean().item())
    assert statistics.cfm_unbiased == pytest.approx(rewards.cfm_unbiased.mean().item())
    assert (statistics.num_groups, statistics.num_samples, statistics.zero_advantage_share) == (5, 20, 0.0)
    assert list(result.groups) == IDS
    for row, group in enumerate(result.groups.values()):
        for name in ("alignment", "diversity", "reward", "raw_alignment", "cfm", "cfm_unbiased"):
            assert getattr(group, name) == pytest.approx(getattr(rewards, name)[row].mean().item())


def test_groups_of_different_sizes_weigh_by_their_samples():
    small, large = grams(1, 2, seed=1), grams(1, 6, seed=2)
    aggregator = RewardAggregator(whitening="none")
    aggregator.start(0, {"large": 6, "small": 2})
    aggregator.add(0, ["small"], small)
    aggregator.add(0, ["large"], large)
    result = aggregator.finish(0)
    assert list(result.rewards) == ["large", "small"]
    both = torch.cat([compute_rewards(gram, whitening="none").reward.flatten() for gram in (small, large)])
    assert result.statistics.reward_mean == pytest.approx(both.mean().item())
    assert result.statistics.reward_std == pytest.approx(both.std().item())


def test_missing_samples_are_named_and_late_groups_complete_the_step():
    gram, partial = grams(), grams(n=3)
    aggregator = RewardAggregator()
    aggregator.start(3, expected())
    aggregator.add(3, IDS[:3], gram[:3])
    aggregator.add(3, [IDS[3]], partial[:1])
    assert aggregator.missing(3) == {IDS[3]: MissingSamples(4, 3), IDS[4]: MissingSamples(4, 0)}
    with pytest.raises(ValueError, match=r"step 3: 2 groups.*\('doc', 3\) \(3 of 4\), \('doc', 4\) \(0 of 4\)"):
        aggregator.finish(3)
    aggregator.add(3, IDS[3:], gram[3:])
    late = aggregator.finish(3)
    assert late.missing == {}
    aggregator.start(3, expected())
    aggregator.add(3, IDS, gram)
    assert aggregator.finish(3).statistics == late.statistics


def test_dropping_incomplete_groups_leaves_them_out_of_everything():
    gram = grams()
    aggregator = RewardAggregator()
    aggregator.start(0, expected())
    aggregator.add(0, IDS[:4], gram[:4])
    aggregator.add(0, [IDS[4]], grams(1, 3))
    result = aggregator.finish(0, drop_incomplete=True)
    assert result.missing == {IDS[4]: MissingSamples(4, 3)}
    assert list(result.advantages) == IDS[:4]
    assert result.statistics.num_samples == 16
    assert result.statistics.cfm == pytest.approx(compute_rewards(gram[:4]).cfm.mean().item())
    aggregator.start(1, expected())
    with pytest.raises(ValueError, match="no group is complete"):
        aggregator.finish(1, drop_incomplete=True)


def test_share_of_groups_without_advantage():
    phi = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    phi[1] = phi[1, :1]  # four equal completions
    aggregator = RewardAggregator(whitening="none")
    aggregator.start(0, {"a": 4, "b": 4})
    aggregator.add(0, ["a", "b"], group_gram(phi, torch.ones(2, 6)))
    assert aggregator.finish(0).statistics.zero_advantage_share == 0.5


def test_single_samples_need_reinforce_and_are_said_once(caplog):
    with pytest.raises(ValueError, match=r"step 0, group 'a'.*'rloo' needs n >= 2"):
        RewardAggregator().start(0, {"a": 1})
    aggregator = RewardAggregator(estimator="reinforce")
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            aggregator.start(step, {"a": 1})
            aggregator.add(step, ["a"], grams(1, 1))
            result = aggregator.finish(step)
    assert len(caplog.records) == 1
    assert result.statistics.cfm_unbiased is None
    assert result.groups["a"].cfm_unbiased is None
    assert result.statistics.diversity == 0
    torch.testing.assert_close(result.advantages["a"], result.rewards["a"])


def test_steps_are_kept_apart():
    aggregator = RewardAggregator()
    aggregator.start(0, {"a": 4})
    aggregator.start(1, {"a": 4})
    aggregator.add(1, ["a"], grams(1, seed=1))
    aggregator.add(0, ["a"], grams(1, seed=2))
    assert aggregator.finish(1).statistics.cfm == pytest.approx(compute_rewards(grams(1, seed=1)).cfm.item())
    with pytest.raises(ValueError, match=r"step 1 is not open; open steps: \[0\]"):
        aggregator.add(1, ["a"], grams(1))
    with pytest.raises(ValueError, match="step 0 is open already"):
        aggregator.start(0, {"a": 4})
    aggregator.discard(0)
    aggregator.start(0, {"a": 4})


def test_bad_deliveries_are_refused_whole():
    gram = grams()
    aggregator = RewardAggregator()
    aggregator.start(0, expected())
    with pytest.raises(ValueError, match=r"does not expect groups \['x'\]"):
        aggregator.add(0, [IDS[0], "x"], gram[:2])
    broken = gram.clone()
    broken[2, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"non-finite.*\('doc', 2\).*1 in all"):
        aggregator.add(0, IDS, broken)
    with pytest.raises(ValueError, match="expected 4 samples, got 5"):
        aggregator.add(0, IDS[:1], grams(1, 5))
    with pytest.raises(ValueError, match="for 2 groups"):
        aggregator.add(0, IDS[:2], gram[:1])
    assert len(aggregator.missing(0)) == 5
    aggregator.add(0, IDS, gram)
    aggregator.add(0, IDS[:1], gram[:1])  # the same again: a retried call
    with pytest.raises(ValueError, match="came twice"):
        aggregator.add(0, IDS[:1], gram[1:2])
    with pytest.raises(ValueError, match="no groups"):
        aggregator.start(1, {})


@pytest.mark.parametrize("samples", [0, 1, 5])
def test_too_few_samples_are_named_and_none_is_spread_over_the_others(samples):
    """Case B07: 6 completions, but products of fewer."""
    aggregator = RewardAggregator(estimator="reinforce")
    aggregator.start(0, {"doc": 6})
    if samples:
        aggregator.add(0, ["doc"], grams(1, samples))
    with pytest.raises(ValueError, match=rf"step 0: 1 groups.*'doc' \({samples} of 6\)"):
        aggregator.finish(0)


def test_too_many_samples_are_named():
    aggregator = RewardAggregator()
    aggregator.start(0, {"doc": 6})
    with pytest.raises(ValueError, match="expected 6 samples, got 7"):
        aggregator.add(0, ["doc"], grams(1, 7))
