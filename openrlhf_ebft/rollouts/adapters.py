"""Rollout engines that keep the base model and take adapters alone (lora.sync: adapter): what both kinds share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openrlhf_ebft.config.lora import LoRAConfig
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.distributed.weight_sync import ExpectedWeights, TensorSpec, dtype_name
from openrlhf_ebft.models.lora import LoRAAdapters, add_adapters, empty_model


@dataclass(frozen=True)
class AdaptedModel:
    """A base model whose adapters, and nothing else, come with weight updates; without one it samples as it is."""

    path: str
    lora: LoRAConfig


def rollout_model(config: EBFTConfig) -> str | AdaptedModel:
    """What the rollout engines of a run load."""
    return AdaptedModel(config.model.path, config.lora) if config.lora.sends_adapters else config.model.path


def split_model(model: str | AdaptedModel) -> tuple[str, LoRAConfig | None]:
    """Path of the (base) model, and the adapters that it gets."""
    return (model.path, model.lora) if isinstance(model, AdaptedModel) else (model, None)


def empty_adapters(path: str, lora: LoRAConfig, *, trust_remote_code: bool = False) -> LoRAAdapters:
    """The adapters of the model at `path` on the meta device: names, shapes and settings, no values."""
    return add_adapters(empty_model(path, trust_remote_code=trust_remote_code), lora, seed=0)


def expected_adapters(adapters: LoRAAdapters, dtype: torch.dtype) -> ExpectedWeights:
    """The tensors that an update must carry: all adapters, in the engine's `dtype`."""
    return ExpectedWeights(
        {
            name: TensorSpec(name, tuple(parameter.shape), dtype_name(dtype))
            for name, parameter in adapters.named_parameters()
        }
    )
