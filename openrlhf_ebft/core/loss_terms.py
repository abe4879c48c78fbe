"""All loss terms of a micro-batch, weighted and added up (algorithms.md, section 7), and the numbers logged with them.

Every value is this micro-batch's share of a mean over the whole step: shares add up over micro-batches and ranks.
B tokens of completions, R supervised tokens of references.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from openrlhf_ebft.core.clipped_losses import (
    ClippedLoss,
    ClipRange,
    clipped_loss,
    sampler_weights,
    sequence_ratio,
    token_ratio,
)
from openrlhf_ebft.core.losses import Aggregation, GlobalCount, KLEstimator, aggregate, kl_estimate, on_policy_loss

PolicyLoss = Literal["reinforce", "ppo", "gspo"]


@dataclass(frozen=True)
class LossSettings:
    """Which terms, with which weights."""

    policy_loss: PolicyLoss
    aggregation: Aggregation
    max_tokens: int  # the constant of `dr_grpo`, in tokens
    clip: ClipRange  # of ppo and gspo
    rl_coef: float
    ce_coef: float
    entropy_coef: float
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    sampler_cap: float | None = None  # of the weights between sampler and trainer; None: no weights


@dataclass(frozen=True, eq=False)
class CompletionTokens:
    """What is known of the completions' tokens in one micro-batch."""

    logprobs: Tensor  # (B,) under the policy, with gradient
    entropy: Tensor  # (B,) nats
    sequence: Tensor  # (B,) int64 completion of each token
    advantages: Tensor  # (B,)
    sampler_logprobs: Tensor  # (B,) as the sampler reported them
    old_logprobs: Tensor | None = None  # (B,) under the policy at rollout time; None: it is still the same
    reference_logprobs: Tensor | None = None  # (B,) under the reference model; needed when kl_coef > 0


def supervised_loss(logprobs: Tensor, tree: Tensor, count: GlobalCount, mode: Aggregation) -> Tensor:
    """Cross-entropy of the ground truth: (R,) log-probabilities, (R,) number of each token's reference.

    `dr_grpo`'s constant is a limit of completions; references have none, so there their tokens are simply averaged.
    """
    return aggregate(-logprobs, tree, count, "token_mean" if mode == "dr_grpo" else mode)


def policy_terms(settings: LossSettings, tokens: CompletionTokens, count: GlobalCount, ce: Tensor) -> dict[str, Tensor]:
    """The whole loss under `loss`, its terms, and measures of how far sampler, old and new policy are apart.

    Args:
        settings: weights and kinds of the terms.
        tokens: the completions' tokens.
        count: sizes of the whole step's completions.
        ce: the `supervised_loss` of the same micro-batch.

    Raises:
        ValueError: a KL term without the reference model's log-probabilities.
    """

    def mean(values: Tensor) -> Tensor:
        return aggregate(values, tokens.sequence, count, "token_mean")

    def whole(values: Tensor) -> Tensor:
        return aggregate(values, tokens.sequence, count, settings.aggregation, settings.max_tokens)

    old = tokens.logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    mismatch = old - tokens.sampler_logprobs
    measures = {"sampler_kl": mean(-mismatch), "sampler_mismatch": mean(mismatch.abs())}
    values, policy_measures = _policy_loss(settings, tokens, old)
    measures |= {name: mean(value) for name, value in policy_measures.items()}
    if settings.sampler_cap is not None:
        weights, ratio = sampler_weights(old, tokens.sampler_logprobs, settings.sampler_cap)
        values = values * weights
        capped = (ratio > settings.sampler_cap).to(ratio.dtype)
        measures |= {"tis/ratio": mean(ratio), "tis/capped_share": mean(capped)}
    rl, entropy = whole(values), whole(tokens.entropy)
    loss = settings.rl_coef * rl + settings.ce_coef * ce - settings.entropy_coef * entropy
    terms = {"rl_loss": rl, "ce_loss": ce, "entropy": entropy}
    if settings.kl_coef > 0:
        if tokens.reference_logprobs is None:
            raise ValueError("the KL term needs the reference model's log-probabilities of every completion")
        terms["kl"] = whole(kl_estimate(tokens.logprobs, tokens.reference_logprobs, settings.kl_estimator))
        loss = loss + settings.kl_coef * terms["kl"]
    return {"loss": loss, **terms, **measures}


def _policy_loss(settings: LossSettings, tokens: CompletionTokens, old: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(B,) token losses, and token values whose means are worth logging."""
    if settings.policy_loss == "reinforce":
        return on_policy_loss(tokens.logprobs, tokens.advantages), {}
    if settings.policy_loss == "ppo":
        ratio = token_ratio(tokens.logprobs, old)
    elif settings.policy_loss == "gspo":
        ratio = sequence_ratio(tokens.logprobs, old, tokens.sequence)
    else:
        raise ValueError(f"unknown policy loss {settings.policy_loss!r}: choose reinforce, ppo or gspo")
    result: ClippedLoss = clipped_loss(ratio, tokens.advantages, settings.clip)
    return result.values, {
        "policy/ratio": result.ratio,
        "policy/clipped_share": result.clipped,
        "policy/update_kl": kl_estimate(old, tokens.logprobs.detach(), "k3"),
    }
