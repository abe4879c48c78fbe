"""vLLM's asynchronous engine with the RAD processor, and vLLM's OpenAI layer on top of it."""

from __future__ import annotations

import os
from typing import Any

from starlette.datastructures import State

from openrlhf_ebft.config.serving import ServingConfig
from openrlhf_ebft.rad.engine.config import CONFIG_KEY
from openrlhf_ebft.serving.rad_fields import engine_rad_config

PROCESSOR = "openrlhf_ebft.rad.vllm_processor:RADLogitsProcessor"
WORKER_EXTENSION = "openrlhf_ebft.serving.worker.ServingWorker"


def engine_arguments(config: ServingConfig, model_path: str, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    engine = config.engine
    arguments: dict[str, Any] = {
        "model": model_path,
        "served_model_name": [config.model_name],
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_length,
        "max_num_seqs": engine.max_num_seqs,
        "enable_prefix_caching": engine.prefix_caching,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager or on_cpu,
        "generation_config": "vllm",  # the model folder's generation config must not change sampling
        "logits_processors": [PROCESSOR],
        "worker_extension_cls": WORKER_EXTENSION,
        "additional_config": {CONFIG_KEY: engine_rad_config(config)},
        "enable_log_requests": False,
    }
    arguments["distributed_executor_backend"] = "mp" if engine.tensor_parallel_size > 1 else "uni"
    if on_cpu:
        return arguments | {"kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30)}
    return arguments | {"gpu_memory_utilization": engine.gpu_memory_utilization}


async def start_engine(config: ServingConfig, model_path: str) -> tuple[Any, State]:
    """Starts the engine in a process of its own and waits until it has loaded its models.

    Returns (vLLM's AsyncLLM, a state that holds vLLM's request handlers). Must run in the event loop that will serve.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu():
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    arguments = AsyncEngineArgs(**engine_arguments(config, model_path, on_cpu=current_platform.is_cpu()))
    client = AsyncLLM.from_vllm_config(arguments.create_engine_config())
    front = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    front.model = model_path
    front.served_model_name = [config.model_name]
    state = State()
    await init_app_state(client, state, front, await client.get_supported_tasks())
    return client, state
