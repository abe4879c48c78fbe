"""Joins or starts a Ray cluster and starts the actors of a run on it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf_ebft.actors.feature_network import FeatureNetworkActor, FeatureNetworkGroup
from openrlhf_ebft.actors.placement import NodeResources, PlacementError, Role, list_roles, plan_bundles
from openrlhf_ebft.actors.policy_trainer import PolicyTrainerActor, PolicyTrainerGroup
from openrlhf_ebft.actors.reward_aggregator import RewardAggregatorActor, RewardAggregatorHandle
from openrlhf_ebft.actors.rollout_engine import RolloutEngineActor, RolloutEngineGroup
from openrlhf_ebft.actors.waiting import wait_for
from openrlhf_ebft.actors.weight_sync import WeightSync, choose_transfer
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import SamplingSettings

_PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME", "VLLM_LOGGING_LEVEL")
_ANSWER_S = 5.0  # limit for a cluster's head to accept a connection, in seconds


def connect(config: EBFTConfig) -> None:
    """Joins the cluster at placement.ray_address (or RAY_ADDRESS), else starts a local one.

    A local cluster has no dashboard and listens on this machine only.

    Raises:
        PlacementError: no cluster answers at the address, or it refuses this program.
    """
    address = config.placement.ray_address or os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        _require_answer(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address or "local",  # None would join any cluster that runs on this machine
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster {address} could not be joined" if address else "a local Ray could not be started"
        raise PlacementError(f"{where}: {error}") from error


def _require_answer(address: str) -> None:
    """Raises PlacementError unless something listens at `address`: Ray itself would try for two minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # a word such as `auto`, which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise PlacementError(
            f"no Ray cluster answers at {address} ({error}): set placement.ray_address (or RAY_ADDRESS) to the "
            "HOST:PORT of its head node, or leave both out for a local one"
        ) from None


@dataclass(frozen=True, eq=False)
class RunActors:
    """Every actor of a run, behind its group."""

    rollout: RolloutEngineGroup
    features: FeatureNetworkGroup
    rewards: RewardAggregatorHandle
    trainer: PolicyTrainerGroup
    weights: WeightSync
    handles: tuple[Any, ...]
    bundles: PlacementGroup

    def kill(self) -> None:
        """Ends every actor at once and gives their resources back."""
        for handle in self.handles:
            ray.kill(handle)
        remove_placement_group(self.bundles)


def start_actors(
    config: EBFTConfig,
    *,
    sampling: SamplingSettings,
    special_ids: Collection[int],
    max_model_len: int,
    total_steps: int,
    say: Callable[[str], None],
) -> RunActors:
    """Places and starts all actors, side by side, and waits until every one has loaded its model.

    Args:
        config: the run's configuration.
        sampling: sampling fields of the rollout engines.
        special_ids: token ids that do not enter pooling.
        max_model_len: limit of prompt + completion of the rollout engines, in tokens.
        total_steps: length of the learning-rate schedule.
        say: takes a line about what is being waited for.

    Raises:
        PlacementError: the cluster is too small, or does not give the resources in time.
        ActorError: an actor could not start; names it, with its own text.
    """
    nodes = _free_nodes()
    with_gpus = any(node.gpus for node in nodes)
    roles = list_roles(config, with_gpus=with_gpus)
    group = _reserve(plan_bundles(roles, nodes), roles, config.placement.schedule_timeout_s)
    threads = config.placement.threads_per_actor or os.cpu_count() or 1
    place = _Placer(group, roles, threads)
    special = tuple(special_ids)
    ranks = place("policy trainer", PolicyTrainerActor, lambda i: (config, i))
    engines = place("rollout engine", RolloutEngineActor, lambda i: (config, sampling, max_model_len))
    replicas = place("feature network", FeatureNetworkActor, lambda i: (config, special))
    (aggregator,) = place("reward aggregator", RewardAggregatorActor, lambda i: (config,))
    rollout, trainer = RolloutEngineGroup(engines, config), PolicyTrainerGroup(ranks, config)
    actors = RunActors(
        rollout=rollout,
        features=FeatureNetworkGroup(replicas),
        rewards=RewardAggregatorHandle(aggregator, config.features.timeout_s),
        trainer=trainer,
        weights=WeightSync(trainer, rollout, choose_transfer(config.rollout, with_gpus=with_gpus)),
        handles=(*ranks, *engines, *replicas, aggregator),
        bundles=group,
    )
    try:
        _wait_until_up(actors, config, total_steps, say)
    except BaseException:
        actors.kill()
        raise
    return actors


def _wait_until_up(actors: RunActors, config: EBFTConfig, total_steps: int, say: Callable[[str], None]) -> None:
    limit, phase = config.placement.start_timeout_s, "start (limit: placement.start_timeout_s)"
    features = actors.features.async_layer_indices()
    actors.trainer.start(total_steps, limit, phase)
    say("policy trainer is up")
    layers = wait_for(phase, actors.features.names, features, limit)
    say(f"feature network is up, taps after blocks {layers[0]}")
    settings = actors.rollout.effective_settings(limit, phase)
    actors.weights.connect()
    shown = ("sampling/temperature", "sampling/top_p", "sampling/top_k", "engine/weight_transfer")
    say("rollout engine is up: " + ", ".join(f"{key} {settings[key]}" for key in shown if key in settings))


def _free_nodes() -> list[NodeResources]:
    available = ray._private.state.available_resources_per_node()
    return [NodeResources(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in available.values()]


def _reserve(bundles: Sequence[dict[str, float]], roles: Sequence[Role], timeout_s: float) -> PlacementGroup:
    group = placement_group(list(bundles), strategy="PACK")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    asked = "; ".join(str(role) for role in roles)
    raise PlacementError(
        f"Ray did not place the actors within placement.schedule_timeout_s = {timeout_s:g} s (asked: {asked}); "
        "another job may hold the resources: see `ray status`"
    )


class _Placer:
    """Starts the actors of one role after the other in their bundles."""

    def __init__(self, group: PlacementGroup, roles: Sequence[Role], threads: int) -> None:
        self._group = group
        self._roles = {role.name: role for role in roles}
        starts = [sum(role.count for role in roles[:i]) for i in range(len(roles))]
        self._first_bundle = dict(zip(self._roles, starts, strict=True))
        self._environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | {
            "OMP_NUM_THREADS": str(threads),  # Ray would set it to the share of CPUs
            "OMP_WAIT_POLICY": "PASSIVE",  # phases alternate: a waiting actor must not keep its cores busy
            "TOKENIZERS_PARALLELISM": "false",
        }

    def __call__(self, name: str, kind: type, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        role = self._roles[name]
        return [
            ray.remote(kind)
            .options(
                num_cpus=role.cpus,
                num_gpus=role.gpus,
                runtime_env={"env_vars": self._environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._first_bundle[name] + i
                ),
            )
            .remote(*arguments(i))
            for i in range(role.count)
        ]
