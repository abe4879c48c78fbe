"""Which resources each role asks for, and whether a cluster has them: plain Python, decided before Ray is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig


@dataclass(frozen=True)
class NodeResources:
    """CPUs and GPUs of one node that no one else has reserved."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Role:
    """`count` actors of one kind, each with its own bundle."""

    name: str
    count: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.name}: {self.count} x ({self.cpus:g} CPU, {self.gpus:g} GPU)"


class PlacementError(UserError):
    """The cluster cannot hold the actors; says what was asked, what there is and what to change."""


def list_roles(config: EBFTConfig, *, with_gpus: bool) -> list[Role]:
    """The actors of a run. Without GPUs in the cluster every role runs on CPUs."""
    place, gpu = config.placement, 1.0 if with_gpus else 0.0
    return [
        Role("policy trainer", config.policy.num_ranks, place.trainer_cpus, gpu * place.gpus_per_trainer_rank),
        Role(
            "rollout engine",
            config.rollout.num_engines,
            place.rollout_cpus,
            gpu * config.rollout.tensor_parallel_size,
        ),
        Role("feature network", config.features.num_replicas, place.feature_cpus, gpu * place.gpus_per_feature_replica),
        Role("reward aggregator", 1, place.aggregator_cpus, 0.0),
    ]


def plan_bundles(roles: Sequence[Role], nodes: Sequence[NodeResources]) -> list[dict[str, float]]:
    """One bundle for each actor, role by role.

    Raises PlacementError when the bundles do not fit the nodes, placed largest first on the fullest node that holds
    them; a bundle never spans two nodes.
    """
    bundles = [(role, role.cpus, role.gpus) for role in roles for _ in range(role.count)]
    free = [[node.cpus, node.gpus] for node in nodes]
    for role, cpus, gpus in sorted(bundles, key=lambda bundle: (-bundle[2], -bundle[1])):
        fitting = [node for node in free if node[0] >= cpus - 1e-9 and node[1] >= gpus - 1e-9]
        if not fitting:
            raise PlacementError(_describe(role, roles, nodes))
        fullest = min(fitting, key=lambda node: (node[1], node[0]))
        fullest[0] -= cpus
        fullest[1] -= gpus
    return [{"CPU": cpus} | ({"GPU": gpus} if gpus else {}) for _, cpus, gpus in bundles]


def _describe(failed: Role, roles: Sequence[Role], nodes: Sequence[NodeResources]) -> str:
    count = sum(role.count for role in roles)
    cpus = sum(role.count * role.cpus for role in roles)
    gpus = sum(role.count * role.gpus for role in roles)
    available = "; ".join(f"node {i}: {node.cpus:g} CPU, {node.gpus:g} GPU" for i, node in enumerate(nodes))
    return (
        f"the cluster cannot hold the {count} actors: no node has room left for a {failed.name} "
        f"({failed.cpus:g} CPU, {failed.gpus:g} GPU)\n"
        f"  asked: {cpus:g} CPU, {gpus:g} GPU ({'; '.join(str(role) for role in roles)})\n"
        f"  available: {available or 'no node'}\n"
        "  to change: the CPU and GPU shares in section placement, policy.num_ranks, rollout.num_engines, "
        "rollout.tensor_parallel_size, features.num_replicas, or a larger cluster"
    )
