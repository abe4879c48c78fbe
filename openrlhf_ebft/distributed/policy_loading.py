"""Loads the policy the way its DeepSpeed stage needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations import HfDeepSpeedConfig

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.distributed.device import plain_attention
from openrlhf_ebft.models.loading import DTYPES, load_causal_lm
from openrlhf_ebft.models.lora import add_adapters
from openrlhf_ebft.models.policy import PolicyModel


def load_policy(config: EBFTConfig, deepspeed_settings: dict[str, Any], device: torch.device) -> PolicyModel:
    """Loads the policy; under ZeRO-3 transformers reads `deepspeed_settings` and loads each rank's shard only."""
    mode = config.model.attention
    attention = plain_attention(mode, device)
    # transformers finds this object through a weak global reference: it must live while the model loads.
    sharding = HfDeepSpeedConfig(deepspeed_settings) if config.deepspeed.zero_stage == 3 else None
    model = load_causal_lm(
        config.model.path,
        dtype=DTYPES[config.model.dtype],
        attention=attention,
        trust_remote_code=config.model.trust_remote_code,
    )
    del sharding
    disable_dropout(model)
    adapters = None
    if config.lora.is_on:  # after that, since lora.dropout is asked for
        adapters = add_adapters(model, config.lora, seed=derive_seed(config.seed, "lora"))
    if config.policy.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(
        model,
        mode,
        temperature=config.rollout.temperature or 1.0,
        chunk_tokens=config.policy.logprob_chunk_tokens,
        with_entropy=config.policy.entropy_coef > 0,
        adapters=adapters,
    )


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout rate to 0: the policy that is trained must be the one that was sampled from."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
