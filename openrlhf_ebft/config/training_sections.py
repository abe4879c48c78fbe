"""Sections of the policy trainer: loss and batches, optimizer, DeepSpeed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from openrlhf_ebft.config.section import DecayRate, Fraction, Section


class PolicyConfig(Section):
    """Batches and loss of the policy trainer."""

    num_ranks: int = Field(1, ge=1, description="data-parallel ranks of the policy trainer")
    max_steps: int | None = Field(None, ge=0, description="EBFT steps; default: as many as epochs give")
    epochs: int = Field(1, ge=1, description="passes over the training rows when max_steps is not set")
    prompts_per_step: int = Field(16, ge=1, description="references of one optimizer step, over all ranks")
    micro_batch_size: int = Field(1, ge=1, description="references of one forward and backward pass on one rank")
    sft_warmup_steps: int = Field(0, ge=0, description="supervised steps on the ground truth before EBFT")
    rl_coef: float = Field(1.0, ge=0.0, description="weight of the REINFORCE term")
    ce_coef: float = Field(0.03, ge=0.0, description="weight of the cross-entropy of the ground truth")
    entropy_coef: float = Field(0.0, ge=0.0, description="weight of the entropy bonus")
    aggregation: Literal["sequence_mean", "token_mean", "dr_grpo"] = Field(
        "sequence_mean", description="how token losses become one number"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    logprob_chunk_tokens: int = Field(512, ge=1, description="tokens whose logits exist at one time")
    max_nonfinite_steps: int = Field(3, ge=1, description="skipped steps in a row that stop the run")
    timeout_s: float = Field(1800.0, gt=0.0, description="limit of one optimizer step, in seconds")


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0.0, description="peak learning rate")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="decay rates of AdamW's moments")
    eps: float = Field(1e-8, gt=0.0, description="AdamW's denominator offset")
    weight_decay: float = Field(0.0, ge=0.0, description="decoupled weight decay; norms and biases are left out")
    max_grad_norm: float = Field(1.0, ge=0.0, description="gradient clipping by global norm; 0 is off")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    min_lr_ratio: Fraction = Field(0.0, description="last learning rate as a share of the peak")


class DeepSpeedConfig(Section):
    """How DeepSpeed shards the trainer."""

    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="ZeRO stage")
    offload_optimizer: bool = Field(False, description="keep optimizer states in CPU memory")
