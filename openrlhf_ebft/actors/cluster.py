"""Joins or starts a Ray cluster and starts the actors of a run on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf_ebft.actors.connection import join_cluster
from openrlhf_ebft.actors.feature_network import FeatureNetworkActor, FeatureNetworkGroup
from openrlhf_ebft.actors.free_resources import NodeResources
from openrlhf_ebft.actors.placement import (
    AGGREGATOR,
    ENGINE,
    FEATURES,
    REFERENCE,
    TRAINER,
    Placement,
    PlacementError,
    plan_placement,
    settle_sharing,
)
from openrlhf_ebft.actors.policy_trainer import PolicyTrainerActor, PolicyTrainerGroup
from openrlhf_ebft.actors.reference_model import ReferenceModelActor, ReferenceModelGroup
from openrlhf_ebft.actors.restarts import Crew, RestartBudget
from openrlhf_ebft.actors.reward_aggregator import RewardAggregatorActor, RewardAggregatorHandle
from openrlhf_ebft.actors.rollout_engine import RolloutEngineActor, RolloutEngineGroup
from openrlhf_ebft.actors.waiting import wait_for
from openrlhf_ebft.actors.weight_sync import WeightSync, choose_transfer
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.core.kernel_caches import kept_kernels
from openrlhf_ebft.core.step_batch import TrainItem

logger = logging.getLogger(__name__)

_PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME", "VLLM_LOGGING_LEVEL")
_KERNEL_CACHES = kept_kernels(64)  # a pass over trees needs some tens of them
_START = "start (limit: placement.start_timeout_s)"


def connect(config: EBFTConfig) -> None:
    """Joins the cluster at placement.ray_address (or RAY_ADDRESS), else starts a local one; see `join_cluster`."""
    join_cluster(config.placement.ray_address)


def ask_free_nodes(address: str) -> list[NodeResources]:
    """Joins a running cluster for as long as it takes to ask what its nodes have left; raises as `join_cluster`."""
    join_cluster(address)
    try:
        return free_nodes()
    finally:
        ray.shutdown()


@dataclass(frozen=True, eq=False)
class RunActors:
    """Every actor of a run, behind its group.

    Where nothing is sampled (`EBFTConfig.samples_completions`), `rollout`, `rewards` and `weights` have no actors and
    are not to be asked.
    """

    rollout: RolloutEngineGroup
    features: FeatureNetworkGroup | None  # None: the trainer's own base model, or nothing is sampled
    rewards: RewardAggregatorHandle
    trainer: PolicyTrainerGroup
    weights: WeightSync
    reference: ReferenceModelGroup | None  # None: no KL term, or the trainer's own base model
    budget: RestartBudget
    started: list[Any]  # handles of all actors, those in the place of lost ones included
    bundles: PlacementGroup

    def kill(self) -> None:
        """Ends every actor at once and gives their resources back."""
        _kill(self.started, self.bundles)

    def with_reference(self, items: Sequence[TrainItem]) -> list[TrainItem]:
        """The items with the log-probabilities of the reference model, as the KL term needs them; waits."""
        if self.reference is None:
            values = self.trainer.branch_logprobs(items, base=True)
        else:
            values = self.reference.logprobs([item.tree for item in items])
        return [replace(item, reference_logprobs=part) for item, part in zip(items, values, strict=True)]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the `with` block the trainer works with the averaged weights, and the next push sends them.

        Afterwards the engines get the trained weights again.
        """
        self.trainer.use_average(True)
        self.weights.forget()
        yield
        # Not after a failure: whoever handles it starts the trainer afresh or ends the run.
        self.trainer.use_average(False)
        self.weights.forget()
        self.weights.push()

    def restart_trainer(self) -> None:
        """Starts the trainer afresh after `StateLost`, with the model of model.path; waits.

        The engines keep what they hold until the next `weights.push`. Where they share a transfer group with the
        trainer, they are started afresh, too.

        Raises ActorError (`StateLost` when a rank is lost on its way).
        """
        self.trainer.restart()
        self.weights.start_over()


def _kill(handles: Sequence[Any], bundles: PlacementGroup) -> None:
    for handle in handles:
        ray.kill(handle)
    remove_placement_group(bundles)


def start_actors(
    config: EBFTConfig,
    *,
    sampling: SamplingSettings,
    special_ids: Collection[int],
    max_model_len: int,
    total_steps: int,
    say: Callable[[str], None],
    report_loss: Callable[[str], None] = logger.warning,
) -> RunActors:
    """Places and starts all actors, side by side, and waits until every one has loaded its model.

    Args:
        config: the run's configuration.
        sampling: sampling fields of the rollout engines.
        special_ids: token ids that do not enter pooling.
        max_model_len: limit of prompt + completion of the rollout engines, in tokens.
        total_steps: length of the learning-rate schedule.
        say: takes a line about what is being waited for.
        report_loss: takes a line about each lost actor and each restart, as long as the actors live.

    Raises:
        PlacementError: the cluster is too small, or does not give the resources in time.
        ActorError: an actor could not start; names it, with its own text.
    """
    nodes = free_nodes()
    placement = plan_placement(config, nodes)
    config = settle_sharing(config, placement)
    group = _reserve(placement, config.placement.schedule_timeout_s)
    budget = RestartBudget(config.recovery, report_loss)
    place = _Placer(group, placement, config, budget)
    try:
        engines = place(ENGINE, RolloutEngineActor, lambda i: (config, sampling, max_model_len))
        rollout = RolloutEngineGroup(engines, config)
        if placement.shares_gpus and config.samples_completions:
            # vLLM measures the free memory of its GPU while it starts: nothing else may take some meanwhile.
            rollout.effective_settings(config.placement.start_timeout_s, _START)
        special = tuple(special_ids)
        ranks = place(TRAINER, PolicyTrainerActor, lambda i: (config, i, special), label="policy trainer rank")
        trainer = PolicyTrainerGroup(ranks, config)
        features = None
        if config.has_feature_actors:
            features = FeatureNetworkGroup(place(FEATURES, FeatureNetworkActor, lambda i: (config, special)), config)
        aggregator = place(AGGREGATOR, RewardAggregatorActor, lambda i: (config,))
        reference = None
        if config.has_reference_actors:
            reference = ReferenceModelGroup(place(REFERENCE, ReferenceModelActor, lambda i: (config,)), config)
        transfer = choose_transfer(
            config.rollout,
            with_gpus=any(node.has_gpus for node in nodes) and config.samples_completions,
            adapters_alone=config.lora.sends_adapters,
        )
        actors = RunActors(
            rollout=rollout,
            features=features,
            rewards=RewardAggregatorHandle(aggregator, (features or trainer).products, config),
            trainer=trainer,
            weights=WeightSync(trainer, rollout, transfer, keep=config.rollout.sync_every_steps > 1),
            reference=reference,
            budget=budget,
            started=place.started,
            bundles=group,
        )
        _wait_until_up(actors, config, total_steps, say)
    except BaseException:
        _kill(place.started, group)
        raise
    return actors


def _wait_until_up(actors: RunActors, config: EBFTConfig, total_steps: int, say: Callable[[str], None]) -> None:
    limit, phase = config.placement.start_timeout_s, _START
    features = actors.features.async_layer_indices() if actors.features else []
    reference = actors.reference.async_is_up() if actors.reference else []
    actors.trainer.start(total_steps, limit, phase)
    say("policy trainer is up")
    if actors.features:
        layers = wait_for(phase, actors.features.names, features, limit)[0]
        say(f"feature network is up, taps after blocks {layers}")
    elif config.base_model_gives_features:
        say(f"features come from the trainer's base model, taps after blocks {actors.trainer.layer_indices()}")
    if actors.reference:
        wait_for(phase, actors.reference.names, reference, limit)
        say("reference model is up")
    if not config.samples_completions:
        return
    settings = actors.rollout.effective_settings(limit, phase)
    actors.weights.connect()
    shown = ("sampling/temperature", "sampling/top_p", "sampling/top_k", "engine/weight_transfer")
    say("rollout engine is up: " + ", ".join(f"{key} {settings[key]}" for key in shown if key in settings))


def free_nodes() -> list[NodeResources]:
    """What each living node of the connected cluster has left."""
    totals = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    available = ray._private.state.available_resources_per_node()
    return [
        NodeResources(free.get("CPU", 0.0), free.get("GPU", 0.0), totals[node].get("GPU", 0.0))
        for node, free in available.items()
        if node in totals
    ]


def _reserve(placement: Placement, timeout_s: float) -> PlacementGroup:
    group = placement_group([bundle.resources() for bundle in placement.bundles], strategy="PACK")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    asked = "; ".join(str(role) for role in placement.roles)
    raise PlacementError(
        f"Ray did not place the actors within placement.schedule_timeout_s = {timeout_s:g} s (asked: {asked}); "
        "another job may hold the resources: see `ray status`"
    )


class _Placer:
    """Starts the actors of one role after the other in their bundles."""

    def __init__(self, group: PlacementGroup, placement: Placement, config: EBFTConfig, budget: RestartBudget) -> None:
        self._group = group
        self._placement = placement
        self._bundles = placement.contiguous(placement_group_table(group)["bundles_to_node_id"])
        self._budget = budget
        self._heartbeat_s = config.recovery.heartbeat_s
        self._schedule_timeout_s = config.placement.schedule_timeout_s
        self.started: list[Any] = []
        threads = config.placement.threads_per_actor or os.cpu_count() or 1
        passed_on = {name: os.environ[name] for name in (*_PASSED_ON, *_KERNEL_CACHES) if name in os.environ}
        self._environment = passed_on | {
            "OMP_NUM_THREADS": str(threads),  # Ray would set it to the share of CPUs
            "OMP_WAIT_POLICY": "PASSIVE",  # phases alternate: a waiting actor must not keep its cores busy
            "TOKENIZERS_PARALLELISM": "false",
        }

    def __call__(
        self, name: str, kind: type, arguments: Callable[[int], tuple[Any, ...]], label: str | None = None
    ) -> Crew:
        role = self._placement.role(name)
        # An engine meets the same few numbers of rows again and again: its kernels are worth keeping.
        environment = self._environment if name == ENGINE else _KERNEL_CACHES | self._environment

        def spawn(number: int) -> Any:
            self._require_bundles()
            bundle = self._bundles[self._placement.bundle_of(name, number)]
            options = ray.remote(kind).options(
                num_cpus=role.cpus,
                num_gpus=role.gpus,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            )
            self.started.append(options.remote(*arguments(number)))
            return self.started[-1]

        numbered = [f"{label or name} {number}" for number in range(role.count)]
        names = [name] * role.count if name == AGGREGATOR else numbered
        return Crew(names, spawn, self._budget, self._heartbeat_s)

    def _require_bundles(self) -> None:
        """After the loss of a node Ray looks for another place for its bundles; raises PlacementError without one."""
        if not self._group.wait(self._schedule_timeout_s):
            asked = "; ".join(str(role) for role in self._placement.roles if role.count)
            raise PlacementError(
                "a node of the cluster is lost, and what is left has no room for its actors within "
                f"placement.schedule_timeout_s = {self._schedule_timeout_s:g} s (asked: {asked}): add a node, then go "
                "on with --resume auto"
            )
