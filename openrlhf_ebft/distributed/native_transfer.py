"""Weight transfer between GPUs by vLLM's own backends, nccl and ipc: the trainer's side.

The trainer's ranks all call `send`; rank 0 drives the engines. The engines' side is `begin_update`, `receive` and
`finish_update` of the vLLM rollout engine, the same three steps that the object-store way takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ebft.distributed.weight_sync import TensorSpec

EngineCall = Callable[[str, Any], Any]  # (method of a rollout engine, its argument) -> result; waits for it
TensorStream = Callable[[], Iterator[tuple[str, Tensor]]]  # a fresh pass over full tensors, a collective under ZeRO-3


class EngineFleet:
    """Rollout engines behind vLLM's client protocol for trainers (`VLLMWeightSyncClient`).

    vLLM's own Ray client sends every engine the same rank offset, which fits replicas of one engine but not several
    engines; and its four calls know nothing of manifests and versions. Calls go to all engines at once, since a
    broadcast begins only when all have joined.
    """

    def __init__(self, calls: Sequence[EngineCall], workers_per_engine: int) -> None:
        """Takes one call function per engine and each engine's number of GPU workers."""
        self._calls = list(calls)
        self._workers = workers_per_engine
        self._manifest: tuple[TensorSpec, ...] = ()
        self._version = 0

    @property
    def num_workers(self) -> int:
        """GPU workers of all engines."""
        return len(self._calls) * self._workers

    def announce(self, version: int, manifest: Sequence[TensorSpec]) -> None:
        """Says what the next transfer carries."""
        self._version, self._manifest = version, tuple(manifest)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Lets every engine join the transfer group; engine e's workers take the ranks after engine e - 1's."""
        infos = [dict(init_info) for _ in self._calls]
        if "rank_offset" in init_info:
            for index, info in enumerate(infos):
                info["rank_offset"] += index * self._workers
        self._all("connect_weight_transfer", infos)

    def start_weight_update(self) -> None:
        """Has every engine check the manifest and start."""
        self._all("begin_update", [self._manifest] * len(self._calls))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Has every engine receive a part; returns when all have it."""
        self._all("receive", [update_info] * len(self._calls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Has every engine finish and publish the announced version."""
        self._all("finish_update", [self._version] * len(self._calls))

    def _all(self, method: str, arguments: Sequence[Any]) -> None:
        """Calls all engines side by side and raises the first error once all have answered."""
        with ThreadPoolExecutor(max_workers=len(self._calls)) as pool:
            futures = [pool.submit(call, method, item) for call, item in zip(self._calls, arguments, strict=True)]
        for future in futures:
            future.result()


class NamedTensorSource:
    """The trainer's tensors as vLLM's senders read them (the interface of vLLM's `WeightSource`)."""

    def __init__(self, specs: Sequence[TensorSpec], stream: TensorStream) -> None:
        """Takes what `stream` yields, in order, in the dtype of the engines."""
        self.specs = tuple(specs)
        self._stream = stream

    def metadata(self) -> list[Any]:
        """Names, dtypes and full shapes, without gathering anything."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in self.specs]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for spec, (name, tensor) in zip(self.specs, self._stream(), strict=True):
            yield name, tensor.detach().to(getattr(torch, spec.dtype))


class NativeSender:
    """One trainer rank's end of the transfer; every rank builds one and calls `send` in step."""

    def __init__(
        self,
        backend: Literal["nccl", "ipc"],
        *,
        rank: int,
        fleet: EngineFleet,
        source: NamedTensorSource,
        address: str,
        port: int,
    ) -> None:
        """Joins the transfer group together with the engines.

        Args:
            backend: nccl when trainer and engines have GPUs of their own, ipc when they share them.
            rank: this trainer rank; rank 0 sends.
            fleet: the rollout engines.
            source: this rank's view of the tensors.
            address: host of rank 0, for nccl's rendezvous.
            port: free port on that host.
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._fleet = fleet
        self._source = source
        info = _init_info(backend, rank=rank, num_workers=fleet.num_workers, address=address, port=port)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=fleet, source=source)

    def send(self, version: int) -> None:
        """Sends all tensors as `version`; raises the engines' error if one refuses or fails."""
        self._fleet.announce(version, self._source.specs)
        self._engine.send_weights()

    def shutdown(self) -> None:
        """Leaves the transfer group."""
        self._engine.shutdown()


def _init_info(backend: str, *, rank: int, num_workers: int, address: str, port: int) -> Any:
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=1 + num_workers, rank=rank)
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(packed=True, rank=rank)
