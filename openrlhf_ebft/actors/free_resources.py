"""What the nodes of a cluster have left: CPUs as a number, GPUs one by one, since a share lies on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4


@dataclass(frozen=True)
class NodeResources:
    """CPUs and GPUs of one node that no one else has reserved; `total_gpus` counts the reserved ones, too."""

    cpus: float
    gpus: float
    total_gpus: float | None = None

    @property
    def has_gpus(self) -> bool:
        """Whether the node has GPUs, free or not."""
        return bool(self.gpus or self.total_gpus)

    def __str__(self) -> str:
        busy = f" (of {self.total_gpus:g})" if self.total_gpus is not None and self.total_gpus > self.gpus else ""
        return f"{self.cpus:g} CPU, {self.gpus:g} GPU{busy}"


@dataclass
class FreeNode:
    """A node while bundles are put on it."""

    node: NodeResources
    cpus: float = field(init=False)
    devices: list[float] = field(init=False)  # free share of each GPU

    def __post_init__(self) -> None:
        self.cpus = self.node.cpus
        whole = math.floor(self.node.gpus + _ROUNDING)
        rest = self.node.gpus - whole
        self.devices = [1.0] * whole + ([rest] if rest > _ROUNDING else [])

    @property
    def room(self) -> tuple[float, float]:
        """(GPUs, CPUs) left."""
        return sum(self.devices), self.cpus

    def holds(self, cpus: float, gpus: float) -> bool:
        """Whether the node has room for `cpus` and for `gpus`: whole devices, or a share of one."""
        return self.cpus >= cpus - _ROUNDING and self._devices_for(gpus) is not None

    def take(self, cpus: float, gpus: float) -> None:
        """Reserves what `holds` has said to be there."""
        devices = self._devices_for(gpus)
        if devices is None:
            raise AssertionError(f"{self.node} does not hold {gpus:g} GPU")
        self.cpus -= cpus
        for number in devices:
            self.devices[number] -= min(gpus, 1.0)

    def _devices_for(self, gpus: float) -> list[int] | None:
        """Numbers of the devices that give `gpus`, the fullest for a share; None when there are not enough."""
        share = min(gpus, 1.0)
        count = math.ceil(gpus - _ROUNDING)
        fitting = [number for number, free in enumerate(self.devices) if free >= share - _ROUNDING]
        fitting.sort(key=lambda number: self.devices[number])
        return fitting[:count] if len(fitting) >= count else None
