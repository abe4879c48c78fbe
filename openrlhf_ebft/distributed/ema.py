"""Exponential moving average of the trained weights, kept in shards and swapped in for evaluation and export.

Every rank averages its own piece of each parameter in float32: under ZeRO-3 the piece that DeepSpeed gave it, else the
same cut of the flattened parameter, which all ranks hold in full. Either way a parameter of N numbers is cut into
pieces of ceil(N / ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


class WeightAverage:
    """average = decay * average + (1 - decay) * weights after every optimizer step, beginning with the first weights.

    Collective: all ranks make the same calls in the same order.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, *, rank: int, world_size: int) -> None:
        """
        Args:
            parameters: those that train, by name; whole, or ZeRO-3 shards.
            decay: weight of the old average, in (0, 1).
            rank: this rank's number.
            world_size: number of ranks.
        """
        self._pieces = {name: _Piece(p, rank, world_size) for name, p in parameters.items()}
        self._decay = decay
        self._rank = rank
        self._world_size = world_size
        self._average = {name: piece.read().float().clone() for name, piece in self._pieces.items()}
        self._trained: dict[str, Tensor] | None = None  # this rank's pieces of the trained weights, while swapped out

    @torch.no_grad()
    def update(self) -> None:
        """Takes the present weights into the average; once for every applied optimizer step.

        Raises RuntimeError while the average is swapped in.
        """
        if self._trained is not None:
            raise RuntimeError("the averaged weights are in use: they cannot be averaged with themselves")
        for name, piece in self._pieces.items():
            self._average[name].lerp_(piece.read().float(), 1 - self._decay)

    @torch.no_grad()
    def swap(self, *, use_average: bool) -> None:
        """Puts the average in the place of the weights, or the trained weights back, bit for bit.

        The optimizer is not touched; nothing happens when it is so already.
        """
        if use_average == (self._trained is not None):
            return
        if use_average:
            self._trained = {name: piece.read().clone() for name, piece in self._pieces.items()}
        source = self._average if use_average else self._trained
        for name, piece in self._pieces.items():
            piece.write(source[name])
        if not use_average:
            self._trained = None

    def saving(self, folder: Path) -> Callable[[], None]:
        """Copies this rank's pieces; what is returned writes them to `folder`, then or later."""
        pieces = {name: tensor.to("cpu", copy=True) for name, tensor in self._average.items()}
        metadata = {"world_size": str(self._world_size)}
        return lambda: save_file(pieces, _file(folder, self._rank), metadata=metadata)

    def load(self, folder: Path) -> None:
        """Reads what the ranks wrote, whose number may have been another.

        Raises RuntimeError when a file is missing or holds other parameters.
        """
        is_own = _world_size(folder) == self._world_size
        found = _read(folder, [self._rank]) if is_own else read_average(folder)
        if set(found) != set(self._pieces):
            raise RuntimeError(f"{folder} averages other parameters than those that train now")
        for name, values in found.items():
            self._average[name].copy_(values if is_own else self._pieces[name].cut(values))


def read_average(folder: Path) -> dict[str, Tensor]:
    """The averages in `folder`, each whole and flat, under the parameters' names in the trainer, float32.

    Raises RuntimeError when a file is missing.
    """
    return _read(folder, range(_world_size(folder)))


class _Piece:
    """This rank's piece of a parameter."""

    def __init__(self, parameter: nn.Parameter, rank: int, world_size: int) -> None:
        self._parameter = parameter
        self._is_sharded = hasattr(parameter, "ds_id")
        self._numel = parameter.ds_numel if self._is_sharded else parameter.numel()
        self._size = -(-self._numel // world_size)
        self._start = min(rank * self._size, self._numel)
        self._stop = min(self._start + self._size, self._numel)
        self._world_size = world_size

    def cut(self, flat: Tensor) -> Tensor:
        """The piece of a whole, flattened parameter."""
        return flat[self._start : self._stop]

    def read(self) -> Tensor:
        """The piece as it is now: a view where possible."""
        if self._is_sharded:
            return self._parameter.ds_tensor.detach()[: self._stop - self._start]  # the rest is padding
        return self.cut(self._parameter.detach().reshape(-1))

    def write(self, values: Tensor) -> None:
        """Sets the piece and, where this rank holds the whole parameter, the pieces of the others, too."""
        if self._is_sharded:
            self.read().copy_(values)
            # Small parameters stay gathered between steps: what they hold would be stale.
            if self._parameter.ds_status.name != "AVAILABLE":
                return
        whole = self._gather(values.to(self._parameter.dtype))
        self._parameter.data.copy_(whole.view_as(self._parameter.data))

    def _gather(self, values: Tensor) -> Tensor:
        if self._world_size == 1:
            return values
        padded = torch.zeros(self._size, dtype=values.dtype, device=values.device)
        padded[: values.numel()] = values
        pieces = [torch.empty_like(padded) for _ in range(self._world_size)]
        dist.all_gather(pieces, padded)
        return torch.cat(pieces)[: self._numel]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"average-rank-{rank}.safetensors"


def _world_size(folder: Path) -> int:
    with _open(_file(folder, 0)) as file:
        return int(file.metadata()["world_size"])


def _read(folder: Path, ranks: Iterable[int]) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for rank in ranks:
        with _open(_file(folder, rank)) as file:
            for name in list(file.keys()):
                parts.setdefault(name, []).append(file.get_tensor(name))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise RuntimeError(f"{path} is missing: the checkpoint was written without policy.ema_decay, or is incomplete")
    return safe_open(path, framework="pt")
