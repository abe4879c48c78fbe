"""Which resources each role gets, and whether a cluster has them: plain Python, decided before Ray is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from openrlhf_ebft.actors.free_resources import FreeNode, NodeResources
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig

TRAINER, ENGINE, FEATURES, AGGREGATOR = "policy trainer", "rollout engine", "feature network", "reward aggregator"
REFERENCE = "reference model"
SHARED_GPU = 0.25
"""What Ray books for one of the four roles on a GPU that they share; they take turns, so it is no limit."""


@dataclass(frozen=True)
class Role:
    """`count` actors of one kind, each with the same resources."""

    name: str
    count: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.name}: {self.count} x ({self.cpus:g} CPU, {self.gpus:g} GPU)"


@dataclass(frozen=True)
class Bundle:
    """Resources that Ray reserves together on one node, and the actors that run in it as (role, number)."""

    cpus: float
    gpus: float
    actors: tuple[tuple[str, int], ...]

    def resources(self) -> dict[str, float]:
        """The bundle as a Ray placement group takes it."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True)
class Placement:
    """Roles, the bundles that hold their actors, and for each bundle the number of a node that has room for it."""

    roles: tuple[Role, ...]
    bundles: tuple[Bundle, ...]
    nodes: tuple[int, ...]
    shares_gpus: bool

    def bundle_of(self, role: str, number: int) -> int:
        """Index of the bundle that holds actor `number` of `role`."""
        return next(i for i, bundle in enumerate(self.bundles) if (role, number) in bundle.actors)

    def role(self, name: str) -> Role:
        """The role of that name, with no actors where the run does without it."""
        return next((role for role in self.roles if role.name == name), Role(name, 0, 0.0, 0.0))

    def contiguous(self, node_ids: Mapping[int, str]) -> list[int]:
        """For each bundle the reserved one to use, so that actors of one role follow each other node by node.

        `node_ids` says on which node Ray has put each bundle; bundles of one kind hold the same resources and can
        change places. Neighbouring trainer ranks then talk inside a node where possible.
        """
        kinds: dict[tuple[str, ...], list[int]] = {}
        for i, bundle in enumerate(self.bundles):
            kinds.setdefault(tuple(role for role, _ in bundle.actors), []).append(i)
        used = [0] * len(self.bundles)
        for members in kinds.values():
            for i, target in zip(members, sorted(members, key=lambda i: (node_ids[i], i)), strict=True):
                used[i] = target
        return used


class PlacementError(UserError):
    """The cluster cannot hold the actors; says what was asked, what there is and what to change."""


def plan_placement(config: EBFTConfig, nodes: Sequence[NodeResources]) -> Placement:
    """Bundles for every actor of a run on the free resources of `nodes`.

    Each actor has a bundle of its own, so a tensor-parallel engine never spans two nodes. On shared GPUs
    (`placement.share_gpus`) a bundle is one GPU with a trainer rank, a rollout engine and a feature replica.

    Raises PlacementError when the actors do not fit; nothing waits.
    """
    with_gpus = any(node.has_gpus for node in nodes)
    _require_possible(config, nodes, with_gpus)
    sharing = config.placement.share_gpus if with_gpus else "never"
    if sharing == "always":
        return _fit_shared(config, nodes)
    try:
        return _fit(list_roles(config, with_gpus=with_gpus), nodes)
    except PlacementError:
        if sharing == "never" or config.rollout.tensor_parallel_size > 1:
            raise
    return _fit_shared(config, nodes)


def list_roles(config: EBFTConfig, *, with_gpus: bool, shared: bool = False) -> list[Role]:
    """The actors of a run, of those roles alone that it needs. Without GPUs in the cluster all run on CPUs.

    Raises PlacementError when model.attention = flex meets a trainer or feature network without a GPU.
    """
    _require_gpus_for_flex(config, with_gpus=with_gpus)
    _require_gpus_for_float16(config, with_gpus=with_gpus)
    place, on = config.placement, 1.0 if with_gpus else 0.0

    def gpus(own: float) -> float:
        return on * (min(own, SHARED_GPU) if shared else own)

    reference_replicas = config.reference.num_replicas if config.has_reference_actors else 0
    feature_replicas = config.features.num_replicas if config.has_feature_actors else 0
    engines = config.rollout.num_engines if config.samples_completions else 0
    roles = [
        Role(TRAINER, config.policy.num_ranks, place.trainer_cpus, gpus(place.gpus_per_trainer_rank)),
        Role(ENGINE, engines, place.rollout_cpus, gpus(config.rollout.tensor_parallel_size)),
        Role(FEATURES, feature_replicas, place.feature_cpus, gpus(place.gpus_per_feature_replica)),
        Role(REFERENCE, reference_replicas, place.reference_cpus, gpus(place.gpus_per_reference_replica)),
        Role(AGGREGATOR, int(config.samples_completions), place.aggregator_cpus, 0.0),
    ]
    return [role for role in roles if role.count]


def _require_gpus_for_float16(config: EBFTConfig, *, with_gpus: bool) -> None:
    without = with_gpus and config.placement.gpus_per_trainer_rank == 0
    if config.model.dtype != "float16" or (with_gpus and not without):
        return
    cause = "placement.gpus_per_trainer_rank = 0" if without else "the cluster has none"
    raise PlacementError(
        f"model.dtype = float16 trains on GPUs alone (DeepSpeed refuses it on CPUs), but {cause}: set model.dtype to "
        "bfloat16 or float32, or give every trainer rank a GPU"
    )


def _require_gpus_for_flex(config: EBFTConfig, *, with_gpus: bool) -> None:
    if config.model.attention != "flex":
        return
    keys = ["gpus_per_trainer_rank", *(["gpus_per_feature_replica"] if config.has_feature_actors else [])]
    without = [f"placement.{key} = 0" for key in keys if getattr(config.placement, key) == 0]
    cause = without[0] if with_gpus and without else "the cluster has none"
    if without or not with_gpus:
        raise PlacementError(
            f"model.attention = flex needs GPUs, but {cause}: set model.attention to split or sdpa, or give every "
            "trainer rank and feature replica a GPU"
        )


def settle_sharing(config: EBFTConfig, placement: Placement) -> EBFTConfig:
    """The configuration that the actors get: what depends on sharing GPUs is filled in.

    Engines on shared GPUs sleep between calls, and weights reach them through the memory of the GPU (nccl refuses two
    members on one device); an engine without a trainer rank on its GPU
    needs Ray's object store.

    Raises PlacementError when rollout.weight_transfer = nccl meets shared GPUs.
    """
    rollout = config.rollout
    if not placement.shares_gpus or rollout.engine != "vllm" or not config.samples_completions:
        return config
    transfer = rollout.weight_transfer
    if transfer == "nccl":
        raise PlacementError(
            "rollout.weight_transfer = nccl needs GPUs of their own for trainer and engines, but they share GPUs here: "
            "set rollout.weight_transfer to auto, or placement.share_gpus to never"
        )
    if transfer == "auto":
        beside_ranks = rollout.num_engines <= config.policy.num_ranks and config.placement.gpus_per_trainer_rank > 0
        transfer = "ipc" if beside_ranks else "object_store"
    sleep = True if rollout.sleep is None else rollout.sleep
    return config.model_copy(
        update={"rollout": rollout.model_copy(update={"weight_transfer": transfer, "sleep": sleep})}
    )


def _require_possible(config: EBFTConfig, nodes: Sequence[NodeResources], with_gpus: bool) -> None:
    """Raises PlacementError for what no number of nodes of this kind can hold."""
    if with_gpus:
        return
    asked = sum(role.count * role.gpus for role in list_roles(config, with_gpus=True))
    if config.placement.require_gpus:
        raise PlacementError(
            f"asked: {asked:g} GPU; available: {_shown(nodes)}\n"
            "the cluster has no GPU, but placement.require_gpus = true: join a cluster that has some "
            "(placement.ray_address), or set placement.require_gpus to false to run on CPUs"
        )
    size = config.rollout.tensor_parallel_size
    if size > 1 and config.samples_completions:
        raise PlacementError(
            f"asked: {size} GPU for each engine; available: {_shown(nodes)}\n"
            f"rollout.tensor_parallel_size = {size} needs GPUs, and the cluster has none: set it to 1"
        )


def _fit(roles: Sequence[Role], nodes: Sequence[NodeResources]) -> Placement:
    bundles = [Bundle(role.cpus, role.gpus, ((role.name, i),)) for role in roles for i in range(role.count)]
    return _place(bundles, roles, nodes, shared=False)


def _fit_shared(config: EBFTConfig, nodes: Sequence[NodeResources]) -> Placement:
    size = config.rollout.tensor_parallel_size
    if size > 1:
        raise PlacementError(
            f"GPUs cannot be shared by engines that span several: rollout.tensor_parallel_size = {size}; "
            "set it to 1, or placement.share_gpus to never"
        )
    roles = list_roles(config, with_gpus=True, shared=True)
    sharers = [role for role in roles if role.gpus]
    bundles = []
    for lane in range(max(role.count for role in sharers)):
        present = [role for role in sharers if lane < role.count]
        actors = tuple((role.name, lane) for role in present)
        bundles.append(Bundle(sum(role.cpus for role in present), 1.0, actors))
    bundles += [Bundle(role.cpus, 0.0, ((role.name, i),)) for role in roles if not role.gpus for i in range(role.count)]
    return _place(bundles, roles, nodes, shared=True)


_ORDERS: tuple[Callable[[Bundle], tuple[float, float]], ...] = (
    lambda bundle: (-bundle.gpus, -bundle.cpus),
    lambda bundle: (-bundle.cpus, -bundle.gpus),
)


def _place(
    bundles: Sequence[Bundle], roles: Sequence[Role], nodes: Sequence[NodeResources], *, shared: bool
) -> Placement:
    """Finds a node for each bundle: largest first, by GPUs and else by CPUs, on the fullest node that holds it."""
    misfits = []
    for order in _ORDERS:
        ordered = sorted(range(len(bundles)), key=lambda i: order(bundles[i]))
        found = _best_fit(bundles, ordered, nodes)
        if not isinstance(found, Bundle):
            return Placement(tuple(roles), tuple(bundles), found, shared)
        misfits.append(found)
    raise PlacementError(_describe(misfits[0], roles, bundles, nodes, shared=shared))


def _best_fit(
    bundles: Sequence[Bundle], order: Iterable[int], nodes: Sequence[NodeResources]
) -> tuple[int, ...] | Bundle:
    """The node of each bundle, or the first bundle that no node has room for."""
    free = [FreeNode(node) for node in nodes]
    assigned = [0] * len(bundles)
    for i in order:
        bundle = bundles[i]
        fitting = [number for number, node in enumerate(free) if node.holds(bundle.cpus, bundle.gpus)]
        if not fitting:
            return bundle
        assigned[i] = min(fitting, key=lambda number: free[number].room)
        free[assigned[i]].take(bundle.cpus, bundle.gpus)
    return tuple(assigned)


def _describe(
    failed: Bundle, roles: Sequence[Role], bundles: Sequence[Bundle], nodes: Sequence[NodeResources], *, shared: bool
) -> str:
    """What was asked, what there is, what to change, and last the bundle that found no room."""
    cpus, gpus = sum(bundle.cpus for bundle in bundles), sum(bundle.gpus for bundle in bundles)
    what = " + ".join(name for name, _ in failed.actors)
    return (
        f"the cluster cannot hold the {sum(role.count for role in roles)} actors{' on shared GPUs' if shared else ''}\n"
        f"  asked: {cpus:g} CPU, {gpus:g} GPU ({'; '.join(str(role) for role in roles if role.count)})\n"
        f"  available: {_shown(nodes)}\n"
        "  to change: the CPU and GPU shares in section placement, policy.num_ranks, rollout.num_engines, "
        "rollout.tensor_parallel_size, features.num_replicas, or a larger cluster\n"
        f"  no node has room left for a {what} ({failed.cpus:g} CPU, {failed.gpus:g} GPU)"
    )


def _shown(nodes: Sequence[NodeResources]) -> str:
    return "; ".join(f"node {i}: {node}" for i, node in enumerate(nodes)) or "no node"
