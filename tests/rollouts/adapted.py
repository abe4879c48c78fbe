"""A trainer's adapted model and the engines that follow it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf_ebft.config.lora import LoRAConfig
from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.distributed.weight_sync import build_update
from openrlhf_ebft.models.lora import LoRAAdapters, add_adapters
from openrlhf_ebft.rollouts.adapters import AdaptedModel
from openrlhf_ebft.rollouts.engine import RolloutEngine, build_engine
from tests.rollouts.requests import SAMPLED

LORA = LoRAConfig(rank=4, alpha=8, rslora=True, sync="adapter")


def adapted_model(folder: Path) -> tuple[PreTrainedModel, LoRAAdapters]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, add_adapters(model, LORA, seed=3)


def change(adapters: LoRAAdapters, seed: int) -> None:
    """New values of the size that a long training would give."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in adapters.named_parameters():
        parameter.data.normal_(std=0.1, generator=generator)


def start_engine(folder: Path, engine: str, *, sync: str = "adapter", max_model_len: int = 96) -> RolloutEngine:
    return build_engine(
        AdaptedModel(str(folder), LORA) if sync == "adapter" else str(folder),
        RolloutConfig(engine=engine, kv_cache_gib=0.05, block_size=32),
        SAMPLED,
        dtype="float32",
        max_model_len=max_model_len,
        seed=0,
        threads=1,
    )


def send_adapters(engine: RolloutEngine, adapters: LoRAAdapters, version: int, without: str | None = None) -> None:
    tensors = [(name, tensor) for name, tensor in adapters.named_parameters() if name != without]
    engine.update_weights(build_update(version, tensors, dtype=torch.float32, chunk_bytes=5_000))
