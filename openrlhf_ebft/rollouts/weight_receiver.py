"""Receiving end of weight updates inside a vLLM worker: a backend of vLLM's own weight-transfer API.

Naming `WORKER_EXTENSION` as the worker extension makes every worker import this module, which registers the backend
before the worker builds its transfer engine. The life cycle (start, update, finish) is vLLM's, the same that its
nccl and ipc backends go through; only the way that tensors arrive differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "object_store"
WORKER_EXTENSION = f"{__name__}.WeightReceiver"


class WeightReceiver:
    """Worker extension: its methods become methods of vLLM's worker and run by `collective_rpc`."""

    def abandon_update(self: Any) -> None:
        """Takes the model's layers out of loading state after a failed update, whatever backend received it.

        Without this a repeated update would add to what the failed one has counted.
        """
        self._weight_update_active = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)


@dataclass
class ObjectStoreInitInfo(WeightTransferInitInfo):
    """Nothing to agree upon: tensors come with the call."""


@dataclass
class ObjectStoreUpdateInfo(WeightTransferUpdateInfo):
    """One chunk of an update."""

    tensors: dict[str, Tensor]  # checkpoint name -> full tensor on the CPU
    last: bool  # no further chunk follows


class ObjectStoreWeightTransferEngine(WeightTransferEngine[ObjectStoreInitInfo, ObjectStoreUpdateInfo]):
    """Loads checkpoint-format tensors that arrive as arguments of the update call."""

    init_info_cls = ObjectStoreInitInfo
    update_info_cls = ObjectStoreUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loaded: set[str] = set()  # parameters of the model that this update has reached

    def init_transfer_engine(self, init_info: ObjectStoreInitInfo) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        """Puts the model's layers into loading state; they are processed again as soon as each is complete."""
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ObjectStoreUpdateInfo) -> None:
        """Loads one chunk.

        Raises:
            RuntimeError: after the last chunk some parameters of the model have not been reached.
        """
        loaded = self.model.load_weights(update_info.tensors.items())
        if loaded is None:  # a few of vLLM's models do not tell
            return
        self._loaded |= loaded
        if update_info.last:
            self._check_complete()

    def finish_weight_update(self) -> None:
        """Processes what is left (attention scales, padded layers) and ends the loading state."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Holds no resources."""

    def _check_complete(self) -> None:
        """Quantised models hold parameters (scales) that no checkpoint carries, so they are left out."""
        if self.model_config.quantization is not None:
            return
        stale = sorted({name for name, _ in self.model.named_parameters()} - self._loaded)
        if stale:
            raise RuntimeError(f"the update did not reach these parameters of the engine's model: {', '.join(stale)}")


WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreWeightTransferEngine)
