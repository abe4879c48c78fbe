"""Sections of the policy trainer: loss and batches, optimizer, DeepSpeed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from openrlhf_ebft.config.section import DecayRate, Fraction, Precision, Section


def _clip_defaults(loss: Any) -> dict[str, float]:
    if loss == "ppo":
        return {"clip_low": 0.2, "clip_high": 0.2}
    return {"clip_low": 3e-4, "clip_high": 4e-4} if loss == "gspo" else {}


class PolicyConfig(Section):
    """Batches and loss of the policy trainer."""

    objective: Literal["ebft", "sft"] = Field(
        "ebft", description="ebft, or sft: the supervised baseline, cross-entropy of the ground truth alone"
    )
    num_ranks: int = Field(1, ge=1, description="data-parallel ranks of the policy trainer")
    max_steps: int | None = Field(None, ge=0, description="EBFT steps; default: as many as epochs give")
    epochs: int = Field(1, ge=1, description="passes over the training rows when max_steps is not set")
    prompts_per_step: int = Field(16, ge=1, description="references of one optimizer step, over all ranks")
    micro_batch_size: int = Field(1, ge=1, description="references of one forward and backward pass on one rank")
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="tokens of one forward and backward pass on one rank, padding included; trees are packed under it, "
        "a larger one is a pass of its own; default: policy.micro_batch_size counts",
    )
    sft_warmup_steps: int = Field(0, ge=0, description="supervised steps on the ground truth before EBFT")
    loss: Literal["reinforce", "ppo", "gspo"] = Field(
        "reinforce",
        description="policy loss; ppo clips the ratio of each token, gspo that of each completion, to what the policy "
        "was at rollout time",
    )
    updates_per_batch: int = Field(1, ge=1, description="optimizer steps made from each batch of rollouts")
    mini_batches: int = Field(1, ge=1, description="parts of a batch of rollouts that its updates take in turn")
    clip_low: float | None = Field(
        None, ge=0.0, lt=1.0, description="ratios below 1 - clip_low are clipped; default: 0.2 for ppo, 3e-4 for gspo"
    )
    clip_high: float | None = Field(
        None, ge=0.0, description="ratios above 1 + clip_high are clipped; default: 0.2 for ppo, 4e-4 for gspo"
    )
    dual_clip: float | None = Field(
        None, gt=1.0, description="limit of the loss at negative advantages, as a multiple of theirs; default: none"
    )
    tis_cap: float | None = Field(
        None,
        gt=0.0,
        description="weigh tokens by their probability under trainer over sampler, at most this; default: not at all",
    )
    rl_coef: float = Field(1.0, ge=0.0, description="weight of the policy loss")
    ce_coef: float = Field(0.03, ge=0.0, description="weight of the cross-entropy of the ground truth")
    entropy_coef: float = Field(0.0, ge=0.0, description="weight of the entropy bonus")
    kl_coef: float = Field(0.0, ge=0.0, description="weight of the KL term towards the reference model; 0: no term")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimate of the KL term for each token")
    aggregation: Literal["sequence_mean", "token_mean", "dr_grpo"] = Field(
        "sequence_mean", description="how token losses become one number"
    )
    ema_decay: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="keep a moving average of the weights with this decay (the paper's authors: 0.9); default: none",
    )
    export_ema: bool = Field(False, description="write the averaged model, too, to model-ema/ in the run directory")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    logprob_chunk_tokens: int = Field(512, ge=1, description="tokens whose logits exist at one time")
    max_nonfinite_steps: int = Field(3, ge=1, description="skipped steps in a row that stop the run")
    timeout_s: float = Field(1800.0, gt=0.0, description="limit of one optimizer step, in seconds")

    @model_validator(mode="before")
    @classmethod
    def _resolve_clip_range(cls, values: Any) -> Any:
        """Fills in what depends on the loss: ratios of whole completions stay much closer to 1 than those of tokens."""
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        return values | {name: given.get(name, default) for name, default in _clip_defaults(values.get("loss")).items()}


class ReferenceConfig(Section):
    """The frozen model that policy.kl_coef keeps the policy near; started only when that is above 0."""

    source: Literal["separate", "policy_base"] = Field(
        "separate",
        description="separate: actors with a model of their own; policy_base: the trainer's own base model with its "
        "adapters switched off (lora.rank), no second copy",
    )
    path: str | None = Field(None, description="reference model's folder or name; default: model.path")
    dtype: Precision | None = Field(None, description="precision of the reference model; default: model.dtype")
    num_replicas: int = Field(1, ge=1, description="number of reference model actors")
    max_tokens_per_batch: int = Field(8192, ge=1, description="tokens of one forward pass of the reference model")
    timeout_s: float = Field(900.0, gt=0.0, description="limit of one step's log-probabilities, in seconds")


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0.0, description="peak learning rate")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="decay rates of AdamW's moments")
    eps: float = Field(1e-8, gt=0.0, description="AdamW's denominator offset")
    weight_decay: float = Field(0.0, ge=0.0, description="decoupled weight decay; norms and biases are left out")
    max_grad_norm: float = Field(1.0, ge=0.0, description="gradient clipping by global norm; 0 is off")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    warmup_ratio: Fraction = Field(0.0, description="linear warm-up as a share of all optimizer steps, rounded up")
    min_lr_ratio: Fraction = Field(0.0, description="last learning rate as a share of the peak")


class DeepSpeedConfig(Section):
    """How DeepSpeed shards the trainer."""

    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="ZeRO stage")
    offload_optimizer: bool = Field(False, description="keep optimizer states in CPU memory")
