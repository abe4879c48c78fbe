"""Loss terms of EBFT over flat tokens (algorithms.md, section 7).

P tokens; `sequence` numbers the sequence (completion or reference) of each token. A term is a SUM divided by a count
over the whole global batch, so micro-batches and ranks add up to the same gradient however the batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["sequence_mean", "token_mean", "dr_grpo"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class GlobalCount:
    """Size of the whole step's batch for one loss term, over all micro-batches and ranks."""

    sequences: int  # sequences with at least one token
    tokens: int

    def __add__(self, other: GlobalCount) -> GlobalCount:
        return GlobalCount(self.sequences + other.sequences, self.tokens + other.tokens)


def count_tokens(sequence: Tensor) -> GlobalCount:
    """Counts the tokens and the non-empty sequences of (P,) sequence numbers."""
    return GlobalCount(sequences=int(sequence.unique().numel()), tokens=int(sequence.numel()))


def aggregate(
    values: Tensor, sequence: Tensor, count: GlobalCount, mode: Aggregation, max_tokens: int | None = None
) -> Tensor:
    """This micro-batch's share of the mean of token values.

    Args:
        values: (P,) token losses.
        sequence: (P,) int64 sequence number of each token; a sequence is never cut between micro-batches.
        count: sizes of the whole batch.
        mode: `sequence_mean` (token mean of each sequence, then mean), `token_mean`, or `dr_grpo`
            (sum / (sequences * max_tokens)).
        max_tokens: the constant of `dr_grpo`, in tokens.

    Returns:
        Scalar; 0 with a gradient path when there is no token.
    """
    if mode == "token_mean":
        return values.sum() / max(count.tokens, 1)
    if mode == "dr_grpo":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(f"aggregation dr_grpo needs max_tokens >= 1, got {max_tokens}")
        return values.sum() / (max(count.sequences, 1) * max_tokens)
    lengths = sequence_lengths(sequence)
    return (values / lengths).sum() / max(count.sequences, 1)


def sequence_lengths(sequence: Tensor) -> Tensor:
    """(P,) float length of the sequence that each token belongs to."""
    if sequence.numel() == 0:
        return torch.ones(0, device=sequence.device)
    return torch.bincount(sequence)[sequence].float()


def on_policy_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Token-level REINFORCE: value -advantage, gradient -advantage * d logprob (ratio 1 by construction).

    Both (P,); advantages carry no gradient.
    """
    return -advantages.detach() * torch.exp(logprobs - logprobs.detach())


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference model), clamped to [-10, 10].

    k1 = log ratio, k2 = half its square, k3 = exp(-log ratio) - 1 + log ratio
    (Schulman, "Approximating KL divergence").
    """
    ratio = logprobs - reference_logprobs
    if estimator == "k1":
        value = ratio
    elif estimator == "k2":
        value = 0.5 * ratio.square()
    elif estimator == "k3":
        value = torch.exp(-ratio) - 1 + ratio
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2 or k3")
    return value.clamp(-10, 10)
