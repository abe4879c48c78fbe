"""What the server adds to vLLM's workers: new weights without a restart, and an end when the server has died."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config

from openrlhf_ebft.rad.vllm_processor import RADWorkerExtension
from openrlhf_ebft.rollouts.expected_weights import expected_weights
from openrlhf_ebft.serving.run_models import RunModel, read_weights, require_unchanged

_LOOK_S = 1.0
_reader = ThreadPoolExecutor(1, thread_name_prefix="weights")


class ServingWorker(RADWorkerExtension):
    """Worker extension: its methods become methods of vLLM's worker and run by `collective_rpc`."""

    _staged: Future[dict[str, Tensor]] | None

    def stage_weights(self: Any, base: str, weights: str, version: str) -> None:
        """Begins to read and check weights into memory, beside the running requests.

        Args:
            base: the model that the engine was started with.
            weights: path of the new weights.
            version: their version.
        """

        def read() -> dict[str, Tensor]:
            model = RunModel(Path(weights), version, 0)
            require_unchanged(model)
            return read_weights(model, expected_weights(base, self.model_config.dtype))

        self._staged = _reader.submit(read)

    def staged_weights(self: Any) -> bool:
        """Whether the weights have been read.

        Raises:
            ValueError, OSError: they cannot be used; nothing has changed.
        """
        if not self._staged.done():
            return False
        try:
            self._staged.result()
        except BaseException:
            self._staged = None
            raise
        return True

    def swap_weights(self: Any) -> None:
        """Puts the read weights into the model. No request may be running; the prefix cache must be reset after."""
        tensors = self._staged.result()
        self._staged = None
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=tensors.items())


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


# A replica that is killed cannot stop its engine, which would hold its memory for ever.
threading.Thread(target=_end_with, args=(os.getppid(),), name="parent-watch", daemon=True).start()
