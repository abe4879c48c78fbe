"""Checkpoint files written by a thread, from copies in host memory, while the trainer goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor, UntypedStorage, nn

Write = Callable[[], Any]
"""Writes one file from memory that nobody changes any more."""


@contextmanager
def copying(engine: DeepSpeedEngine) -> Iterator[list[Write]]:
    """Inside the `with` block `engine.save_checkpoint` copies instead of writing; yields the writes that are left."""
    own = engine.checkpoint_engine
    writes: list[Write] = []
    engine.checkpoint_engine = _CopyingEngine(own, writes)
    try:
        yield writes
    finally:
        engine.checkpoint_engine = own


class _CopyingEngine(TorchCheckpointEngine):
    """In the place of DeepSpeed's own checkpoint engine, whose files it will write."""

    def __init__(self, own: TorchCheckpointEngine, writes: list[Write]) -> None:
        super().__init__()
        self._own = own
        self._writes = writes

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        self._writes.append(partial(self._own.save, snapshot(state_dict), path))


def snapshot(value: Any) -> Any:
    """A copy of dicts, lists and tuples in which every tensor lies in host memory of its own.

    Tensors that share memory share it in the copy, too, so that a file of it is as large. Other objects are deep
    copies.
    """
    return _copy(value, {})


def _copy(value: Any, storages: dict[int, UntypedStorage]) -> Any:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(_copy(value.detach(), storages), value.requires_grad)
    if isinstance(value, Tensor):
        return _copy_tensor(value, storages)
    if isinstance(value, dict):
        items = [(key, _copy(entry, storages)) for key, entry in value.items()]
        return type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(_copy(entry, storages) for entry in value)
    return copy.deepcopy(value)


def _copy_tensor(tensor: Tensor, storages: dict[int, UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


class BackgroundWrite:
    """Runs `writes` one after the other in a thread."""

    def __init__(self, writes: Sequence[Write]) -> None:
        pool = ThreadPoolExecutor(1, "checkpoint")
        self._done: Future[None] = pool.submit(run_writes, list(writes))
        pool.shutdown(wait=False)

    def settle(self) -> None:
        """Waits for the end, whatever it is."""
        self._done.exception()

    def is_done(self) -> bool:
        """Without waiting. Raises what a write raised."""
        if not self._done.done():
            return False
        self._done.result()
        return True


def run_writes(writes: list[Write]) -> None:
    """Takes them from the list one by one."""
    while writes:
        writes.pop(0)()  # its copy is freed before the next file is written
