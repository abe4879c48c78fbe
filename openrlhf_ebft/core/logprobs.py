"""Log-probabilities of given tokens without holding all logits: chunks of tokens, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    source: Tensor | None = None,
    *,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, at the sampling temperature.

    Args:
        logits: (U, V) any float dtype; not modified.
        targets: (P,) int64.
        temperature: scalar or (U,), > 0; both results describe softmax(logits / temperature).
        source: (P,) int64 row of each target; default: one target a row.
        with_entropy: let gradients flow through the entropies.

    Returns:
        (P,) float32 log-probabilities and (P,) float32 entropies, in nats.
    """
    rows = torch.arange(len(logits), device=logits.device) if source is None else source
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)
    chosen, entropy = _TokenLogprobs.apply(logits, scale, rows, targets)
    return chosen, entropy[rows] if with_entropy else entropy[rows].detach()


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies whose gradient is written in one pass over the vocabulary.

    Autograd's own would make a zero tensor of the logits' size for the chosen entries and several more on the way.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """logits (U, V), scale (U or 1, 1) temperatures, rows and targets (P,) -> (P,) and (U,) float32."""
        scaled = logits / scale if logits.dtype == torch.float32 else logits.float().div_(scale)
        logprobs = torch.log_softmax(scaled, dim=-1)
        entropy = -torch.linalg.vecdot(torch.exp(logprobs, out=scaled), logprobs)
        ctx.save_for_backward(logprobs, entropy, scale, rows, targets)
        ctx.set_materialize_grads(False)
        ctx.logits_dtype = logits.dtype
        return logprobs[rows, targets], entropy

    @staticmethod
    def backward(ctx: Any, chosen: Tensor | None, entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d chosen = onehot - p and d entropy = -p (log p + entropy), both divided by the temperature."""
        logprobs, entropies, scale, rows, targets = ctx.saved_tensors
        gradient = logprobs.exp()
        if entropy is None:
            weight = torch.zeros(len(gradient), 1, device=gradient.device)
        else:
            weight = (logprobs + entropies[:, None]) * entropy[:, None]
        if chosen is not None:
            weight = weight + torch.zeros_like(entropies).index_add_(0, rows, chosen)[:, None]
        gradient.mul_(weight.neg_())
        if chosen is not None:
            gradient.index_put_((rows, targets), chosen, accumulate=True)
        return gradient.div_(scale).to(ctx.logits_dtype), None, None, None


@dataclass(frozen=True, eq=False)
class Predictions:
    """Tokens whose log-probabilities are asked for: P targets of U distributions, each distribution computed once."""

    states: Tensor  # (U,) int64 index of the hidden state behind each distribution
    temperature: Tensor  # (U,) float32, > 0
    source: Tensor  # (P,) int64 distribution of each target, in rising order
    targets: Tensor  # (P,) int64 token ids
    order: Tensor  # (P,) int64: result i belongs to target order[i] of the caller

    @classmethod
    def of(cls, states: Tensor, targets: Tensor, temperature: Tensor) -> Predictions:
        """Finds targets that share hidden state and temperature.

        Args:
            states: (P,) int64 index of the state that predicts each target.
            targets: (P,) int64.
            temperature: (P,) float32.
        """
        levels, level = torch.unique(temperature, return_inverse=True)
        keys, inverse = torch.unique(states * max(levels.numel(), 1) + level, return_inverse=True)
        source, order = torch.sort(inverse, stable=True)
        count = max(levels.numel(), 1)
        return cls(keys // count, levels[keys % count], source, targets[order], order)


def chunked_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, wanted: Predictions, num_chunks: int, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every target, one of `num_chunks` pieces of the distributions at a time.

    Args:
        head: maps (rows, H) hidden states to (rows, V) logits; called exactly `num_chunks` times, and as often again
            in the backward pass, which recomputes a piece's logits instead of keeping them.
        hidden: (N, H) hidden states; P may be 0, which keeps the gradient path of the head.
        wanted: what is asked for.
        num_chunks: at least 1. Sharded heads gather weights in every call, so all ranks must use the same number.
        with_entropy: let gradients flow through the entropies; without, they are numbers to look at.

    Returns:
        (P,) float32 log-probabilities and (P,) float32 entropies in nats, in the caller's order of targets.
    """

    def one_chunk(rows: Tensor, temperature: Tensor, source: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(rows), targets, temperature, source, with_entropy=with_entropy)

    pieces = torch.arange(wanted.states.numel(), device=hidden.device).tensor_split(num_chunks)
    parts = []
    start = 0
    for piece in pieces:
        stop = start + piece.numel()
        first, last = torch.searchsorted(wanted.source, torch.tensor([start, stop], device=hidden.device)).tolist()
        arguments = (
            hidden[wanted.states[start:stop]],
            wanted.temperature[start:stop],
            wanted.source[first:last] - start,
            wanted.targets[first:last],
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(one_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(one_chunk(*arguments))
        start = stop
    back = torch.argsort(wanted.order)
    return torch.cat([part[0] for part in parts])[back], torch.cat([part[1] for part in parts])[back]
