"""Policy losses of several optimizer steps on one batch of rollouts: PPO and GSPO clipping, dual clip, and the
truncated importance weights between sampler and trainer.

P tokens; `sequence` (P,) int64 numbers the completion of each token. PPO: Schulman et al. 2017 (arXiv 1707.06347).
GSPO: Zheng et al. 2025 (arXiv 2507.18071). Dual clip: Ye et al. 2020 (arXiv 1912.09729).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ebft.core.losses import sequence_lengths

# exp of it is 4.9e8: no ratio that a clip range lets through comes near, and its gradient stays a number.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ClipRange:
    """Ratios are clipped to [1 - low, 1 + high]; `dual` bounds the loss of samples with negative advantage."""

    low: float
    high: float
    dual: float | None = None  # above 1: such a sample costs at most dual * |advantage|; None: no bound

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 or self.high < 0:
            raise ValueError(f"a clip range needs 0 <= low < 1 and high >= 0, got {self.low} and {self.high}")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"the dual clip must be above 1, got {self.dual}")


@dataclass(frozen=True, eq=False)
class ClippedLoss:
    """Token losses and what clipping did to them."""

    values: Tensor  # (P,) float, with gradient
    ratio: Tensor  # (P,) float, no gradient: policy now / policy at rollout time
    clipped: Tensor  # (P,) float 0 or 1: the clip decided this token's loss, so it has no gradient


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """(P,) ratio of each token, PPO's; log ratios beyond +-20 are cut."""
    return torch.exp((logprobs - old_logprobs.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, sequence: Tensor) -> Tensor:
    """(P,) ratio of each token's sequence, GSPO's: exp of the mean over its tokens of the log ratio."""
    share = (logprobs - old_logprobs.detach()) / sequence_lengths(sequence)
    size = int(sequence.max()) + 1 if sequence.numel() else 0
    mean = torch.zeros(size, dtype=share.dtype, device=share.device).index_add(0, sequence, share)
    return torch.exp(mean.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)[sequence])


def clipped_loss(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> ClippedLoss:
    """-min(ratio * A, clip(ratio) * A), and with a dual clip at most dual * |A| where A < 0.

    Args:
        ratio: (P,) with gradient, of tokens or of their sequences.
        advantages: (P,), taken as constants.
        clip: the range.
    """
    advantages = advantages.detach()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    # `where` instead of `maximum`, which would split the gradient of equal values between the two.
    is_clipped = bounded > free
    values = torch.where(is_clipped, bounded, free)
    if clip.dual is not None:
        limit = -advantages * clip.dual
        too_dear = (advantages < 0) & (values > limit)
        values = torch.where(too_dear, limit, values)
        is_clipped = is_clipped | too_dear
    return ClippedLoss(values, ratio.detach(), is_clipped.to(values.dtype))


def sampler_weights(trainer_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Truncated importance weights min(trainer / sampler, cap) of tokens that another implementation sampled.

    Args:
        trainer_logprobs: (P,) of the trainer's policy at rollout time.
        sampler_logprobs: (P,) as the sampler reported them.
        cap: largest weight, above 0.

    Returns:
        (P,) weights without gradient, and the (P,) ratios before the cut.

    Raises:
        ValueError: `cap` is not positive.
    """
    if cap <= 0:
        raise ValueError(f"the cap of importance weights must be above 0, got {cap}")
    ratio = token_ratio(trainer_logprobs.detach(), sampler_logprobs)
    return ratio.clamp(max=cap), ratio
