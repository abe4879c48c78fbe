"""A placement as lines of text, and which of its actors would not fit their memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from openrlhf_ebft.actors.free_resources import NodeResources
from openrlhf_ebft.actors.memory_estimate import GIB, RoleMemory
from openrlhf_ebft.actors.placement import Placement
from openrlhf_ebft.config.errors import UserError

_SHAPE = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


def parse_cluster(text: str, *, cpus: int = 96) -> list[NodeResources]:
    """Nodes of an imagined cluster, from `NODESxGPUS` or `NODESxGPUSxCPUS` such as 2x8 or 1x0x2.

    Raises UserError for another spelling.
    """
    match = _SHAPE.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise UserError(f"--cluster {text}: must be NODESxGPUS or NODESxGPUSxCPUS, such as 2x8 or 1x0x2")
    node = NodeResources(float(match[3] or cpus), float(match[2]))
    return [node] * int(match[1])


def layout_lines(placement: Placement, nodes: Sequence[NodeResources]) -> list[str]:
    """One line for each node: CPUs and GPUs taken, and the numbers of the actors that it holds."""
    rows = [("node", "CPU", "GPU", "holds")]
    for number, node in enumerate(nodes):
        held = [bundle for bundle, at in zip(placement.bundles, placement.nodes, strict=True) if at == number]
        actors = [actor for bundle in held for actor in bundle.actors]
        roles = [(role.name, sorted(i for name, i in actors if name == role.name)) for role in placement.roles]
        rows.append(
            (
                str(number),
                f"{sum(bundle.cpus for bundle in held):g} of {node.cpus:g}",
                f"{sum(bundle.gpus for bundle in held):g} of {node.gpus:g}",
                ", ".join(f"{name} {_ranges(numbers)}" for name, numbers in roles if numbers) or "nothing",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    if placement.shares_gpus:
        lines.append("trainer ranks, engines and feature replicas share GPUs and take turns")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, runs written as first-last: 0-3,6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def memory_lines(memory: Sequence[RoleMemory]) -> list[str]:
    """One line for each role."""
    lines = []
    for need in memory:
        host = f" and {_gib(need.host)} of host memory" if need.host else ""
        lines.append(f"{need.role}: {_gib(need.device)} each{host}, and activations")
    return lines


def gpu_problems(memory: Sequence[RoleMemory], placement: Placement, gpu_bytes: float) -> list[str]:
    """Actors whose GPUs are too small, by the roles that lie on one GPU."""
    needs = {need.role: need.device for need in memory}
    problems = []
    for kind in dict.fromkeys(tuple(name for name, _ in bundle.actors) for bundle in placement.bundles if bundle.gpus):
        # An engine on a shared GPU sleeps while the others work, but they keep theirs while it samples.
        need = sum(needs[role] for role in kind if role in needs)
        if need > gpu_bytes:
            problems.append(
                f"{' + '.join(kind)} on one GPU: {_gib(need)} and activations, but a GPU has {_gib(gpu_bytes)}: "
                "set deepspeed.zero_stage to 3 with more policy.num_ranks, deepspeed.offload_optimizer to true, "
                "rollout.gpu_memory_utilization lower, or features.path to a smaller network"
            )
    return problems


def engine_problems(weights: float, limit: float) -> list[str]:
    """An engine whose share of a GPU does not hold its weights, both in bytes."""
    if weights < limit:
        return []
    return [
        f"rollout engine: its weights take {_gib(weights)} of each GPU, but rollout.gpu_memory_utilization leaves "
        f"{_gib(limit)}: set rollout.tensor_parallel_size or rollout.gpu_memory_utilization higher"
    ]


def host_problems(memory: Sequence[RoleMemory], counts: dict[str, int], free: float) -> list[str]:
    """All actors on the CPUs of one machine whose memory is too small."""
    need = sum(counts[entry.role] * (entry.device + entry.host) for entry in memory)
    if need <= free:
        return []
    parts = ", ".join(f"{counts[entry.role]} x {entry.role} {_gib(entry.device + entry.host)}" for entry in memory)
    return [
        f"memory: the actors need {_gib(need)} and activations ({parts}), but {_gib(free)} are free: choose a smaller "
        "model, lora.rank above 0, or fewer ranks, engines and replicas"
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
