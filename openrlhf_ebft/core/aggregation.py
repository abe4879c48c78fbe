"""Gathers the groups of a training step from several feature networks and turns them into advantages and statistics.

Nothing is computed before the step is complete, and then in the order in which the step was announced: the result
depends neither on the order of arrival nor on which replica sent which group.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openrlhf_ebft.core.advantages import check_estimator, compute_advantages
from openrlhf_ebft.core.gram import require_floating
from openrlhf_ebft.core.rewards import GroupRewards, Whitening, add_function_values, compute_rewards
from openrlhf_ebft.core.step_rewards import (
    GroupId,
    GroupValues,
    MissingSamples,
    StepRewards,
    StepStatistics,
    group_values,
    step_statistics,
)

__all__ = [
    "GroupId",
    "GroupValues",
    "MissingSamples",
    "NonFiniteGroups",
    "RewardAggregator",
    "StepRewards",
    "StepStatistics",
]

logger = logging.getLogger(__name__)


class NonFiniteGroups(ValueError):
    """Embeddings of some groups hold NaN or infinities."""

    def __init__(self, step: int, groups: Sequence[GroupId]) -> None:
        super().__init__(step, groups)  # all arguments, so that the exception survives pickling
        self.step = step
        self.groups = list(groups)

    def __str__(self) -> str:
        return f"step {self.step}: non-finite embeddings in groups {self.groups[:10]!r} ({len(self.groups)} in all)"


class RewardAggregator:
    """Collects the inner products of every group of a step, then computes rewards once over the whole step.

    Several steps may be open at the same time.
    """

    def __init__(
        self,
        *,
        alignment_coef: float = 1.0,
        diversity_coef: float = 1.0,
        whitening: Whitening = "feature",
        whiten_tol: float = 1e-5,
        estimator: str = "rloo",
        function_coef: float = 0.0,
    ) -> None:
        """`function_coef` weighs the values of a reward function that `finish` may get; the rest: `compute_rewards`."""
        self._alignment_coef = alignment_coef
        self._diversity_coef = diversity_coef
        self._whitening = whitening
        self._whiten_tol = whiten_tol
        self._estimator = estimator
        self._function_coef = function_coef
        self._expected: dict[int, dict[GroupId, int]] = {}
        self._grams: dict[int, dict[GroupId, Tensor]] = {}
        self._said_single = False

    def start(self, step: int, expected: Mapping[GroupId, int]) -> None:
        """Announce a step: the number of samples of every group. Its order is the order of the result.

        Raises:
            ValueError: the step is open already, holds no group, or a group has no sample, or one sample with an
                estimator that needs siblings.
        """
        if step in self._expected:
            raise ValueError(f"step {step} is open already")
        if not expected:
            raise ValueError(f"step {step} has no groups")
        for group, count in expected.items():
            try:
                check_estimator(self._estimator, count)
            except ValueError as error:
                raise ValueError(f"step {step}, group {group!r}: {error}") from None
        if 1 in expected.values() and not self._said_single:
            self._said_single = True
            logger.warning("groups of one sample: diversity is 0 and the reward has no baseline")
        self._expected[step] = dict(expected)
        self._grams[step] = {}

    def add(self, step: int, group_ids: Sequence[GroupId], gram: Tensor) -> None:
        """Take groups of one size from a feature network; all of them or, after an error, none.

        A group that came with too few samples may come again with more; an equal copy of a group is ignored.

        Args:
            step: an open step.
            group_ids: G names.
            gram: (G, n+1, n+1) raw inner products (`group_gram`), the ground truth last.
        Raises:
            ValueError: step not open, unknown group, shape, too many samples, non-finite products, or a second and
                different delivery; groups are named.
        """
        expected = self._open(step)
        require_floating("gram", gram)
        if gram.ndim != 3 or gram.shape[0] != len(group_ids) or gram.shape[1] != gram.shape[2] or gram.shape[1] < 2:
            raise ValueError(f"gram must be ({len(group_ids)}, n+1, n+1) for {len(group_ids)} groups, got {gram.shape}")
        unknown = [group for group in group_ids if group not in expected]
        if unknown:
            raise ValueError(f"step {step} does not expect groups {unknown[:10]!r} ({len(unknown)} in all)")
        finite = gram.isfinite().flatten(1).all(-1).tolist()
        bad = [group for group, good in zip(group_ids, finite, strict=True) if not good]
        if bad:
            raise NonFiniteGroups(step, bad)
        taken = dict(self._grams[step])
        for group, products in zip(group_ids, gram.detach().to("cpu", torch.float64), strict=True):
            self._check_delivery(step, group, products, taken.get(group))
            taken[group] = products
        self._grams[step] = taken

    def missing(self, step: int) -> dict[GroupId, MissingSamples]:
        """Groups of an open step of which samples have not come."""
        expected = self._open(step)
        came = {group: len(gram) - 1 for group, gram in self._grams[step].items()}
        return {
            group: MissingSamples(count, came.get(group, 0))
            for group, count in expected.items()
            if came.get(group, 0) < count
        }

    def finish(
        self, step: int, *, drop_incomplete: bool = False, function_values: Mapping[GroupId, Tensor] | None = None
    ) -> StepRewards:
        """Rewards, advantages and statistics of a step, which is closed then.

        Args:
            step: an open step.
            drop_incomplete: leave out groups with missing samples, and report them in the result.
            function_values: (n,) values of a reward function for every group, in the order of its samples.
        Raises:
            ValueError: samples are missing (named; the step stays open for late groups), or no group is complete.
        """
        missing = self.missing(step)
        if missing and not drop_incomplete:
            raise ValueError(f"step {step}: {_describe(missing)}")
        complete = [group for group in self._expected[step] if group not in missing]
        if not complete:
            raise ValueError(f"step {step}: no group is complete; {_describe(missing)}")
        grams = self._grams[step]
        batches = []
        for size in sorted({len(grams[group]) for group in complete}):
            names = [group for group in complete if len(grams[group]) == size]
            rewards = self._rewards(torch.stack([grams[group] for group in names]))
            if function_values is not None:
                extra = torch.stack([function_values[group] for group in names])
                rewards = add_function_values(rewards, extra, self._function_coef)
            batches.append((names, rewards, compute_advantages(rewards, self._estimator)))
        del self._expected[step], self._grams[step]
        by_group = {
            group: (advantage.float(), reward.float())
            for names, rewards, advantages in batches
            for group, advantage, reward in zip(names, advantages, rewards.reward, strict=True)
        }
        values = {
            group: value
            for names, rewards, _ in batches
            for group, value in zip(names, group_values(rewards), strict=True)
        }
        return StepRewards(
            groups={group: values[group] for group in complete},
            advantages={group: by_group[group][0] for group in complete},
            rewards={group: by_group[group][1] for group in complete},
            statistics=step_statistics([(rewards, advantages) for _, rewards, advantages in batches]),
            missing=missing,
        )

    def discard(self, step: int) -> None:
        """Forget an open step, for example to run it again after a failure."""
        self._open(step)
        del self._expected[step], self._grams[step]

    def _open(self, step: int) -> dict[GroupId, int]:
        if step not in self._expected:
            raise ValueError(f"step {step} is not open; open steps: {sorted(self._expected)}")
        return self._expected[step]

    def _check_delivery(self, step: int, group: GroupId, products: Tensor, before: Tensor | None) -> None:
        samples, expected = len(products) - 1, self._expected[step][group]
        if samples > expected:
            raise ValueError(f"step {step}, group {group!r}: expected {expected} samples, got {samples}")
        if before is not None and len(products) <= len(before) and not torch.equal(products, before):
            raise ValueError(
                f"step {step}, group {group!r} came twice with different values "
                f"({len(before) - 1}, then {samples} of {expected} samples)"
            )

    def _rewards(self, gram: Tensor) -> GroupRewards:
        return compute_rewards(
            gram,
            alignment_coef=self._alignment_coef,
            diversity_coef=self._diversity_coef,
            whitening=self._whitening,
            whiten_tol=self._whiten_tol,
        )


def _describe(missing: Mapping[GroupId, MissingSamples]) -> str:
    some = [f"{group!r} ({count.received} of {count.expected})" for group, count in list(missing.items())[:10]]
    return f"{len(missing)} groups with missing samples: {', '.join(some)}"
