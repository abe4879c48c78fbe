"""Ray shell of the reward aggregator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import ObjectRef

from openrlhf_ebft.actors.waiting import wait_for
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.aggregation import RewardAggregator, StepRewards
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_rewards import GroupProducts

GroupKey = tuple[str, int]
"""(example id, anchor number)."""


class RewardAggregatorActor:
    """Collects the inner products of a step's groups from all feature replicas and turns them into advantages."""

    def __init__(self, config: EBFTConfig) -> None:
        self._aggregator = RewardAggregator(
            alignment_coef=config.reward.alignment_coef,
            diversity_coef=config.reward.diversity_coef,
            whitening=config.features.whitening,
            whiten_tol=config.features.whiten_tol,
            estimator=config.reward.advantage,
        )

    def start(self, step: int, expected: Mapping[GroupKey, int]) -> None:
        self._aggregator.start(step, expected)

    def add(self, step: int, products: GroupProducts) -> None:
        for example_id, gram in products:
            self._aggregator.add(step, [(example_id, anchor) for anchor in range(len(gram))], gram)

    def finish(self, step: int) -> StepRewards:
        return self._aggregator.finish(step)

    def discard(self, step: int) -> None:
        self._aggregator.discard(step)


class RewardAggregatorHandle:
    """The driver's side: feeds the actor references, so that products go from replica to aggregator directly."""

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = timeout_s

    def rewards(
        self, step: int, trees: Sequence[RolloutTree], products: Mapping[str, ObjectRef], phase: str = "rewards"
    ) -> StepRewards:
        """Rewards of all groups of `trees`; waits for the feature replicas behind `products`, too.

        Raises:
            ActorError: a replica or the aggregator failed; the step is forgotten and can be started again.
        """
        name = ["reward aggregator"]
        expected = {(t.example_id, anchor): t.num_samples for t in trees for anchor in range(t.num_anchors)}
        wait_for(phase, name, [self._actor.start.remote(step, expected)], self._timeout_s)
        try:
            additions = [self._actor.add.remote(step, part) for part in products.values()]
            wait_for("features", list(products), list(products.values()), self._timeout_s)
            wait_for(phase, name * len(additions), additions, self._timeout_s)
            return wait_for(phase, name, [self._actor.finish.remote(step)], self._timeout_s)[0]
        except BaseException:
            self._actor.discard.remote(step)
            raise
