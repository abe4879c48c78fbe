"""What `openrlhf-ebft doctor` finds: the machine, the cluster, and whether a configuration fits them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf_ebft import __version__
from openrlhf_ebft.actors.free_resources import NodeResources
from openrlhf_ebft.actors.layout_report import (
    engine_problems,
    gpu_problems,
    host_problems,
    layout_lines,
    memory_lines,
)
from openrlhf_ebft.actors.machine import (
    GIB,
    PORTS,
    Machine,
    free_disk,
    package_problems,
    package_versions,
    ports_in_use,
    read_machine,
    tool_problems,
)
from openrlhf_ebft.actors.memory_estimate import ModelSize, checkpoint_bytes, estimate_memory, read_model_size
from openrlhf_ebft.actors.placement import PlacementError, plan_placement, settle_sharing
from openrlhf_ebft.config.sections import EBFTConfig

_TOKEN = Path("~/.ray/auth_token")


@dataclass
class Findings:
    """Lines to read and problems to solve."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, label: str, text: str) -> None:
        self.lines.append(f"{label:<10}{text}")


def examine_machine(findings: Findings) -> Machine:
    """Packages, tools, devices, memory, disk and ports of this machine."""
    machine = read_machine()
    versions = package_versions()
    findings.add("version", f"openrlhf-ebft {__version__}, Python {platform.python_version()}, {platform.platform()}")
    findings.add("packages", ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()))
    findings.add("devices", _devices(machine))
    findings.add("memory", f"{_gib(machine.free_memory)} of {_gib(machine.memory)} free")
    findings.add("disk", f"{_gib(free_disk(Path()))} free at {Path().absolute()}")
    used = ports_in_use(list(PORTS))
    states = (f"{port} {name} {'in use' if port in used else 'free'}" for port, name in PORTS.items())
    findings.add("ports", ", ".join(states))
    findings.add("ray", _ray_line())
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        findings.problems.append(f"Python {platform.python_version()}: 3.11 or 3.12 is needed")
    findings.problems += package_problems(versions) + tool_problems()
    return machine


def _devices(machine: Machine) -> str:
    cards = [f"{gpu.name} ({_gib(gpu.free)} of {_gib(gpu.memory)} free)" for gpu in machine.gpus]
    return ", ".join([f"{machine.cores} CPU cores", *(cards or ["no NVIDIA GPU"])])


def _ray_line() -> str:
    address = os.environ.get("RAY_ADDRESS")
    named = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)
    token = sorted(named)[0] if named else str(_TOKEN) if _TOKEN.expanduser().is_file() else "none"
    return f"RAY_ADDRESS {address or 'not set'}, authentication token: {token}"


def local_nodes(machine: Machine) -> list[NodeResources]:
    """This machine as a cluster of one node, the way Ray would start it."""
    return [NodeResources(float(machine.cores), float(len(machine.gpus)))]


def examine_config(
    config: EBFTConfig, nodes: Sequence[NodeResources], machine: Machine | None, gpu_bytes: float | None, out: Findings
) -> None:
    """Placement on `nodes` and memory of the actors; with `machine`, which they run on, its memory and disk, too."""
    try:
        placement = plan_placement(config, nodes)
        config = settle_sharing(config, placement)
    except PlacementError as error:
        out.problems.append(str(error))
        return
    out.lines += ["", f"placement of {config.name}:", *(f"  {line}" for line in layout_lines(placement, nodes))]
    policy, features, reference = _sizes(config, out)
    if policy is None or features is None or reference is None:
        return
    on_gpus = any(bundle.gpus for bundle in placement.bundles)
    memory = estimate_memory(config, policy, features, reference, gpu_bytes=gpu_bytes if on_gpus else None)
    known = "" if not on_gpus or gpu_bytes else " (GPU memory unknown, not compared: --gpu-memory GIB)"
    out.lines += ["", f"memory{known}:", *(f"  {line}" for line in memory_lines(memory))]
    if on_gpus and gpu_bytes is not None:
        out.problems += gpu_problems(memory, placement, gpu_bytes)
        if config.rollout.engine == "vllm" and config.samples_completions:
            share = policy.total * (4 if config.model.dtype == "float32" else 2) / config.rollout.tensor_parallel_size
            out.problems += engine_problems(share, config.rollout.gpu_memory_utilization * gpu_bytes)
    if machine is None:
        return
    if not on_gpus:
        out.problems += host_problems(memory, {role.name: role.count for role in placement.roles}, machine.free_memory)
    _examine_disk(config, policy, out)


def _sizes(config: EBFTConfig, out: Findings) -> list[ModelSize | None]:
    """Sizes of policy, feature network and reference model; says which is not known."""
    paths = [config.model.path, config.features.path, config.reference.path]
    sizes: dict[str, ModelSize | None] = {}
    for path in dict.fromkeys(path or config.model.path for path in paths):
        folder = Path(path)
        sizes[path] = read_model_size(folder) if folder.is_dir() else None
        if sizes[path] is None:
            out.lines += ["", f"memory: {path} is no local folder with safetensors, so its size is not known here"]
    return [sizes[path or config.model.path] for path in paths]


def _examine_disk(config: EBFTConfig, policy: ModelSize, out: Findings) -> None:
    root = Path(config.logging.root)
    need, free = checkpoint_bytes(config, policy), free_disk(root)
    out.lines += ["", f"disk: checkpoints and model take up to {_gib(need)} at {root}, {_gib(free)} are free"]
    if need > free:
        out.problems.append(
            f"disk: the run's checkpoints and model take up to {_gib(need)}, but {root} has {_gib(free)} free: set "
            "logging.root to a larger disk, or checkpoint.keep_last lower"
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
