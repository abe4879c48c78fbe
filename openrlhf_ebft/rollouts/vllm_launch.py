"""How vLLM is started: environment, engine arguments, and what it would otherwise change in this process."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.distributed.device import set_compute_threads

# The CPU attention kernel works on blocks of this many tokens.
CPU_BLOCK = 32


def prepare_environment(threads: int) -> None:
    """Settings that vLLM reads from the environment, made before it is imported.

    The engine runs in this process (no engine-core process of its own), so weights are handed over without a copy
    and an error arrives as it was raised. In this mode vLLM binds no threads to cores; it keeps the number of
    torch threads when OMP_NUM_THREADS is set and goes down to one otherwise.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(set_compute_threads(threads))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def transfer_backend(config: RolloutConfig, on_cpu: bool) -> str:
    """Name of vLLM's weight-transfer backend; raises ValueError for one that needs a GPU where there is none."""
    if config.weight_transfer == "auto":
        return "object_store" if on_cpu else "nccl"
    if on_cpu and config.weight_transfer != "object_store":
        raise ValueError(
            f"rollout.weight_transfer={config.weight_transfer} needs a GPU; on CPU use object_store (or auto)"
        )
    return config.weight_transfer


def engine_arguments(config: RolloutConfig, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments that the rollout section decides.

    Raises:
        ValueError: a block size or number of workers that vLLM cannot have on CPU.
    """
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,  # token ids in and out: text is nobody's business here
        "generation_config": "vllm",  # the model folder's generation config must not change sampling
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager or on_cpu,
    }
    if not on_cpu:
        return arguments | {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": bool(config.sleep),
            # Inside a placement group vLLM would take Ray's executor and ask for more GPUs than the actor has.
            "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
        }
    if config.block_size % CPU_BLOCK:
        raise ValueError(
            f"rollout.block_size={config.block_size}: on CPU vLLM needs a multiple of {CPU_BLOCK}, "
            f"for example {CPU_BLOCK * (config.block_size // CPU_BLOCK + 1)}"
        )
    if config.tensor_parallel_size > 1:
        raise ValueError(f"rollout.tensor_parallel_size={config.tensor_parallel_size}: on CPU an engine has one worker")
    kv_bytes = int(config.kv_cache_gib * 2**30)
    return arguments | {"kv_cache_memory_bytes": kv_bytes, "distributed_executor_backend": "uni"}


def start_vllm(model_path: str, arguments: dict[str, Any], backend: str) -> Any:
    """Starts vLLM; on CPU it replaces torch.set_num_threads for the whole process, which is undone here."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from openrlhf_ebft.rollouts.weight_receiver import WORKER_EXTENSION

    set_num_threads = torch.set_num_threads
    try:
        return LLM(
            model_path,
            worker_extension_cls=WORKER_EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=backend),
            **arguments,
        )
    finally:
        torch.set_num_threads = set_num_threads


def plain_eager(on_cpu: bool) -> AbstractContextManager[Any]:
    """On CPU, keeps torch.compile out: one small function of vLLM's sampler costs 13 s of C++ compilation."""
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()
