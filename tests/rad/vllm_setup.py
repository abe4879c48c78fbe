"""A tiny language model and two reward models on disk, and the real vLLM with RAD on them (CPU, this process)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.tiny_models import PAD_ID, VOCAB, tiny_llama, tiny_tokenizer

MAX_LEN = 128


def save_models(folder: Path) -> Any:
    """Saves `lm`, `kind` (one output) and `toxic` (two outputs); returns the language model."""
    model = tiny_llama(folder / "lm")
    tiny_tokenizer(folder / "lm")
    for name, seed, labels in (("kind", 5, 1), ("toxic", 6, 2)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            num_labels=labels,
            pad_token_id=PAD_ID,
        )
        LlamaForSequenceClassification(config).save_pretrained(folder / name)
        tiny_tokenizer(folder / name)
    return model


def rad_entry(folder: Path, **changes: Any) -> dict[str, Any]:
    """The `rad` entry of `additional_config`; every score is compared with a full forward."""
    models = {
        "kind": {"path": str(folder / "kind"), "score_transform": "sigmoid"},
        "toxic": {"path": str(folder / "toxic"), "score_transform": "sigmoid", "score_index": 1},
    }
    return {"reward_models": models, "default": "kind", "cache_tokens": 2048, "verify": True} | changes


def engine_arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of vLLM for the saved models."""
    from openrlhf_ebft.rad.vllm_processor import PROCESSOR, WORKER_EXTENSION

    return {
        "model": str(folder / "lm"),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_LEN,
        "block_size": 32,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 2**24,
        "generation_config": "vllm",
        "logits_processors": [PROCESSOR],
        "worker_extension_cls": WORKER_EXTENSION,
        "additional_config": {"rad": rad_entry(folder)},
    } | changes


def start(folder: Path, *, is_asynchronous: bool = False, **changes: Any) -> Any:
    """vLLM in this process. It replaces torch.set_num_threads, which is undone.

    With `is_asynchronous` the scheduler plans a step before the last one's tokens are known. vLLM's CPU platform
    switches that off; here it is switched on again.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    from vllm import LLM

    set_num_threads = torch.set_num_threads
    try:
        with pytest.MonkeyPatch.context() as patch:
            if is_asynchronous:
                _let_the_scheduler_run_ahead(patch)
            llm = LLM(**engine_arguments(folder, **changes))
    finally:
        torch.set_num_threads = set_num_threads
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == is_asynchronous
    return llm


def _let_the_scheduler_run_ahead(patch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def update(cls: type, config: Any) -> None:
        original(config)
        config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(update))


def rad_of(llm: Any) -> Any:
    """The engine-free core inside a running vLLM of this process."""
    from openrlhf_ebft.rad.vllm_processor import _engine_of

    core = llm.llm_engine.engine_core.engine_core
    return _engine_of(core.model_executor.driver_worker.worker.model_runner)
