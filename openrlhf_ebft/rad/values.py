"""Candidate values: what scores the next-token candidates of a decoding step.

A value is any callable `value(ctx: StepContext) -> Tensor[B, K]`; :class:`BaseCandidateValue` adds the few
attributes that a processor and a control read.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SCORE_TRANSFORMS = ("none", "sigmoid", "softmax")
# Largest factor of a reward. Logits are lost in rounding long before; from 3e38 on float32 itself gives inf and NaN.
MOST_STRENGTH = 1e30


@dataclass(frozen=True)
class StepContext:
    """One decoding step as a value sees it. Shapes: B rows, T prefix tokens, K candidates per row.

    Attributes:
        prefix_ids: [B, T] int64, the tokens so far, padding included.
        candidate_ids: [B, K] int64, the tokens that may come next.
        lm_tokenizer: the language model's tokenizer (needed to score through text), or None.
        attention_mask: [B, T], 1 where `prefix_ids` is a real token, or None when all are.
        model: the language model, for values that read it, or None.
    """

    prefix_ids: torch.Tensor
    candidate_ids: torch.Tensor
    lm_tokenizer: Any = None
    attention_mask: torch.Tensor | None = None
    model: Any = None

    def real_tokens(self) -> torch.Tensor:
        """[B, T] bool, True at real tokens.

        Raises:
            ValueError: ids or mask have shapes that do not belong together.
        """
        if self.prefix_ids.dim() != 2 or self.candidate_ids.dim() != 2:
            raise ValueError(
                "prefix_ids and candidate_ids must be [B, T] and [B, K], "
                f"got {tuple(self.prefix_ids.shape)} and {tuple(self.candidate_ids.shape)}"
            )
        if self.prefix_ids.size(0) != self.candidate_ids.size(0):
            raise ValueError(
                f"prefix_ids has {self.prefix_ids.size(0)} rows, candidate_ids {self.candidate_ids.size(0)}"
            )
        if self.attention_mask is None:
            return torch.ones_like(self.prefix_ids, dtype=torch.bool)
        if self.attention_mask.shape != self.prefix_ids.shape:
            raise ValueError(
                f"attention_mask {tuple(self.attention_mask.shape)} and prefix_ids {tuple(self.prefix_ids.shape)} "
                "must have the same shape"
            )
        return self.attention_mask.to(self.prefix_ids.device) != 0


class BaseCandidateValue(ABC):
    """Base of the values that come with the package.

    Attributes:
        supports_batching: whether several rows may be scored in one call.
        vocab_limit: ids at or above it cannot be scored and are never candidates; None = no limit.
    """

    supports_batching: bool = True
    vocab_limit: int | None = None

    @abstractmethod
    def score(self, ctx: StepContext) -> torch.Tensor:
        """Scores [B, K] of `ctx.candidate_ids`, each given its row's prefix."""

    def __call__(self, ctx: StepContext) -> torch.Tensor:
        return self.score(ctx)

    def for_call(self) -> BaseCandidateValue:
        """A copy for one generate call: shares the models, owns whatever it remembers between steps."""
        return copy.copy(self)

    def cleanup(self) -> None:  # noqa: B027 - an optional hook: most values hold nothing
        """Drop what the value holds (models, caches); it cannot score afterwards."""


CandidateValue = Callable[[StepContext], torch.Tensor]


class WeightedValue(BaseCandidateValue):
    """Weighted sum of several values: sum_i weight_i * value_i(ctx), before any normalisation.

    Raises:
        ValueError: no value, or a weight that is not a finite number.
    """

    def __init__(self, weighted: Sequence[tuple[CandidateValue, float]]) -> None:
        if not weighted:
            raise ValueError("WeightedValue needs at least one (value, weight) pair")
        for position, (_, weight) in enumerate(weighted):
            if not torch.isfinite(torch.tensor(float(weight))):
                raise ValueError(f"weight {position} of WeightedValue must be finite, got {weight}")
        self.weighted = [(value, float(weight)) for value, weight in weighted]
        based = [value for value, _ in self.weighted if isinstance(value, BaseCandidateValue)]
        self.supports_batching = all(value.supports_batching for value in based)
        limits = [value.vocab_limit for value in based if value.vocab_limit is not None]
        self.vocab_limit = min(limits) if limits else None

    def score(self, ctx: StepContext) -> torch.Tensor:
        """Sum [B, K] of the weighted scores, float32."""
        total = torch.zeros(ctx.candidate_ids.shape, dtype=torch.float32, device=ctx.candidate_ids.device)
        for value, weight in self.weighted:
            total = total + weight * value(ctx).to(total)
        return total

    def for_call(self) -> WeightedValue:
        return WeightedValue(
            [(value.for_call() if isinstance(value, BaseCandidateValue) else value, w) for value, w in self.weighted]
        )

    def cleanup(self) -> None:
        for value, _ in self.weighted:
            if isinstance(value, BaseCandidateValue):
                value.cleanup()
        self.weighted = []


def extract_score(output: Any, score_index: int, score_transform: str) -> torch.Tensor:
    """One float32 score per row of a classifier's output.

    Args:
        output: an object with `logits`, or a tensor; [..., C] with C output columns.
        score_index: the column.
        score_transform: applied over the columns first: `none`, `sigmoid`, `softmax`.

    Returns:
        [...] float32.

    Raises:
        ValueError: unknown transform, or a column that the output does not have.
    """
    check_score_transform(score_transform)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    logits = logits.float()
    if not 0 <= score_index < logits.size(-1):
        raise ValueError(f"score_index {score_index} is outside the reward model's {logits.size(-1)} output columns")
    if score_transform == "none":
        return logits[..., score_index]
    if score_transform == "sigmoid":
        return torch.sigmoid(logits[..., score_index])
    return torch.softmax(logits, dim=-1)[..., score_index]


def check_score_transform(name: object) -> None:
    """Raise ValueError for anything but one of SCORE_TRANSFORMS."""
    if name not in SCORE_TRANSFORMS:
        raise ValueError(f"score_transform must be one of {', '.join(SCORE_TRANSFORMS)}, got {name!r}")
