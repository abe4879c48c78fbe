"""Ray shell of the reward aggregator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ray import ObjectRef

from openrlhf_ebft.actors.pulse import start_pulse
from openrlhf_ebft.actors.restarts import Crew
from openrlhf_ebft.actors.waiting import ActorError, ResultLost
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.aggregation import NonFiniteGroups, RewardAggregator, StepRewards
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_rewards import GroupProducts

if TYPE_CHECKING:
    from openrlhf_ebft.data.reward_function import TreeRewards

GroupKey = tuple[str, int]
"""(example id, anchor number)."""


class RewardAggregatorActor:
    """Turns the inner products of a step's groups, from all feature replicas, into advantages."""

    def __init__(self, config: EBFTConfig) -> None:
        start_pulse()
        self._aggregator = RewardAggregator(
            alignment_coef=config.reward.alignment_coef,
            diversity_coef=config.reward.diversity_coef,
            whitening=config.features.whitening,
            whiten_tol=config.features.whiten_tol,
            estimator=config.reward.advantage,
            function_coef=config.reward.function_coef,
        )
        self._function = None if config.reward.function is None else _load_function(config)

    def is_up(self) -> bool:
        """Answers once the actor can work."""
        return True

    def rewards(
        self, step: int, expected: Mapping[GroupKey, int], trees: Sequence[RolloutTree], *products: GroupProducts
    ) -> StepRewards:
        """Rewards of the `expected` groups; nothing is kept after the call, be it answered or failed.

        `trees` are read by reward.function alone. Raises NonFiniteGroups, with all such groups of the step,
        RewardFunctionError, and what `RewardAggregator` raises.
        """
        self._aggregator.start(step, expected)
        try:
            bad: list[GroupKey] = []
            for part in products:
                for example_id, gram in part:
                    try:
                        self._aggregator.add(step, [(example_id, anchor) for anchor in range(len(gram))], gram)
                    except NonFiniteGroups as error:
                        bad += error.groups
            if bad:
                raise NonFiniteGroups(step, bad)
            values = None if self._function is None else self._function.values(trees)
            return self._aggregator.finish(step, function_values=values)
        except BaseException:
            self._aggregator.discard(step)
            raise


def _load_function(config: EBFTConfig) -> TreeRewards:
    # Only here: without a reward function this process needs no library of models or tokenizers.
    from openrlhf_ebft.data.reward_function import RewardFunction, TreeRewards
    from openrlhf_ebft.data.tokenizers import load_run_tokenizer, stop_token_ids

    tokenizer = load_run_tokenizer(config)
    stops = stop_token_ids(tokenizer, config.model.path)
    return TreeRewards(RewardFunction(config.reward.function), tokenizer, stops)


class RewardAggregatorHandle:
    """The driver's side: hands the actor references, so that products go from replica to aggregator directly."""

    def __init__(
        self, crew: Crew, products: Callable[[Sequence[RolloutTree]], list[ObjectRef]], config: EBFTConfig
    ) -> None:
        """`products` gives references to the inner products of all groups of some trees."""
        self._crew = crew
        self._products = products
        self._with_function = config.reward.function is not None
        self._timeout_s = config.features.timeout_s
        self._start_timeout_s = config.placement.start_timeout_s

    def rewards(self, step: int, trees: Sequence[RolloutTree], phase: str = "rewards") -> StepRewards:
        """Features and rewards of all groups of `trees`; waits. Lost actors are started again and asked again.

        Raises:
            ActorError: a replica or the aggregator failed, or is lost and the budget of restarts is used up. Its
                `cause` is NonFiniteGroups when embeddings were not finite.
        """
        texts = list(trees) if self._with_function else []
        expected = {(t.example_id, anchor): t.num_samples for t in trees for anchor in range(t.num_anchors)}
        while True:
            products = self._products(trees)
            call = {0: lambda actor, parts=tuple(products): actor.rewards.remote(step, expected, texts, *parts)}
            try:
                return self._crew.call(phase, call, self._timeout_s, self._restart)[0]
            except ResultLost as failure:  # the node that held a replica's answer has gone
                self._crew.budget.spend(failure)

    def _restart(self, number: int, failure: ActorError) -> None:
        self._crew.restart(number, failure, lambda actor: actor.is_up.remote(), self._start_timeout_s)
