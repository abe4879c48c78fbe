"""The adapter of a vLLM engine: one at a time, under a name and number of its own for every version."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from openrlhf_ebft.config.lora import LoRAConfig
from openrlhf_ebft.models.lora import LoRAAdapters, save_adapters

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # room for a rank that vLLM can reserve


def adapter_arguments(lora: LoRAConfig) -> dict[str, Any]:
    """vLLM's arguments for an engine with one adapter. Raises ValueError for a rank above what vLLM takes."""
    fitting = [rank for rank in _RANKS if rank >= lora.rank]
    if not fitting:
        raise ValueError(f"lora.rank = {lora.rank}: vLLM takes adapters up to rank {_RANKS[-1]}")
    return {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1, "max_cpu_loras": 1}


class AdapterSlot:
    """Hands adapters to vLLM through a folder, the one way that it takes them.

    vLLM keeps keys and values of a prompt under the adapter's name and folder. Both are new for every version, so a
    cached prefix never comes from another version.
    """

    def __init__(self, llm: Any, adapters: LoRAAdapters, base: str) -> None:
        """
        Args:
            llm: vLLM's `LLM`, started with `adapter_arguments`.
            adapters: their settings.
            base: path of the base model, for the record.
        """
        self._llm = llm
        self._adapters = adapters
        self._base = base
        self._root = Path(tempfile.mkdtemp(prefix="ebft-adapter-"))
        self._count = 0
        self.request: Any = None  # vLLM's LoRARequest of the adapter in force; None: the base model

    def switch(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Puts a new adapter in the place of the old one; the old one stays if vLLM refuses the new one."""
        from vllm.lora.request import LoRARequest

        self._count += 1
        folder = self._root / f"version-{version}-{self._count}"
        folder.mkdir()
        save_adapters(folder, self._adapters.config, tensors, self._base)
        request = LoRARequest(folder.name, self._count, str(folder))
        try:
            self._llm.llm_engine.add_lora(request)
        except BaseException:
            shutil.rmtree(folder)
            raise
        previous, self.request = self.request, request
        if previous is not None:
            self._llm.llm_engine.remove_lora(previous.lora_int_id)
            shutil.rmtree(previous.lora_path)

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._root, ignore_errors=True)
