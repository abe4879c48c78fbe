"""Rules between the lora section and the rest: see `rules`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from openrlhf_ebft.config.lora import LoRAConfig

if TYPE_CHECKING:
    from openrlhf_ebft.config.sections import EBFTConfig

MAX_ENGINE_RANK = 512
"""Highest rank of adapters that vLLM takes."""


def lora_keys_need_a_rank(config: EBFTConfig) -> Iterator[str]:
    """lora.* beside lora.rank = 0 would be ignored."""
    if config.lora.is_on:
        return
    for name, field in LoRAConfig.model_fields.items():
        value = getattr(config.lora, name)
        if value != field.default:
            shown = list(value) if isinstance(value, tuple) else value
            yield (
                f"lora.{name} = {shown} has no effect with lora.rank = 0: set lora.rank to 1 or more (16), or leave "
                f"lora.{name} out"
            )


def engines_take_adapters(config: EBFTConfig) -> Iterator[str]:
    """What lora.sync = adapter asks of the rollout engine."""
    lora, rollout = config.lora, config.rollout
    if not lora.sends_adapters:
        return
    if rollout.engine == "vllm" and lora.rank > MAX_ENGINE_RANK:
        yield (
            f"lora.rank = {lora.rank}: vllm takes adapters up to rank {MAX_ENGINE_RANK}; set lora.rank to that or "
            "less, or lora.sync to merged"
        )
    if rollout.weight_transfer in ("nccl", "ipc"):
        yield (
            f"rollout.weight_transfer = {rollout.weight_transfer} carries whole weights, but lora.sync = adapter sends "
            "adapters alone: set rollout.weight_transfer to auto or object_store, or lora.sync to merged"
        )


def policy_base_is_the_feature_network(config: EBFTConfig) -> Iterator[str]:
    """What features.source = policy_base asks of the other sections."""
    features, model = config.features, config.model
    if features.source != "policy_base":
        return
    if not config.lora.is_on:
        yield (
            "features.source = policy_base takes the policy's own frozen weights, but with lora.rank = 0 all weights "
            "train: set lora.rank to 1 or more (16), or features.source to separate"
        )
    for name, own in (("path", model.path), ("dtype", model.dtype)):
        value = getattr(features, name)
        if value not in (None, own):
            yield (
                f"features.{name} = {value}, but features.source = policy_base takes that of the policy, model.{name} "
                f"= {own}: leave features.{name} out, or set features.source to separate"
            )
    if features.num_replicas > 1:
        yield (
            f"features.num_replicas = {features.num_replicas}, but features.source = policy_base computes features on "
            f"the {config.policy.num_ranks} trainer ranks: leave features.num_replicas out"
        )
    if config.deepspeed.zero_stage == 3 and model.attention == "rows":
        yield (
            "features.source = policy_base with deepspeed.zero_stage = 3 and model.attention = rows: ranks would run "
            "different numbers of passes; set model.attention to sdpa, or deepspeed.zero_stage to 2 or less"
        )


LORA_RULES = (lora_keys_need_a_rank, engines_take_adapters, policy_base_is_the_feature_network)
