"""Log-probabilities of given tokens without holding all logits: chunks of tokens, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CACHED_ROWS = 32  # distributions that a CPU works on at one time: their float32 copies stay in its cache


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
        source: (P,) int64 row of each target, in rising order; default: one target a row.
        with_entropy: let gradients flow through the entropies.

    Returns:
        (P,) float32 log-probabilities and (P,) float32 entropies, in nats.
    """
    rows = torch.arange(len(logits), device=logits.device) if source is None else source
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)
    chosen, entropy = _TokenLogprobs.apply(logits, scale, rows, targets)
    return chosen, entropy[rows] if with_entropy else entropy[rows].detach()


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies without a float32 copy of all logits: block by block, forward and backward.

    Autograd's own would keep that copy, make a zero tensor of its size for the chosen entries and several more on the
    way.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """logits (U, V), scale (U or 1, 1) temperatures, rows (rising) and targets (P,) -> (P,) and (U,) float32."""
        log_mass, entropy = logits.new_empty(2, len(logits), dtype=torch.float32)
        for block, scaled in _scaled_blocks(logits, scale):
            largest = scaled.amax(-1, keepdim=True)
            masses = torch.exp(scaled.sub_(largest))
            mass = masses.sum(-1)
            log_mass[block] = largest[:, 0] + mass.log()
            # A product of matrices, since `vecdot` would hold another tensor of the block's size.
            mean = (masses[:, None] @ scaled[:, :, None])[:, 0, 0] / mass
            entropy[block] = mass.log() - mean
        chosen = logits[rows, targets].float() / scale.expand(len(logits), 1)[rows, 0] - log_mass[rows]
        ctx.save_for_backward(logits, scale, log_mass, entropy, rows, targets)
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, chosen: Tensor | None, entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d chosen = onehot - p and d entropy = -p (log p + entropy), both divided by the temperature."""
        logits, scale, log_mass, entropies, rows, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        pull = torch.zeros_like(log_mass)  # what each row's probabilities are multiplied with
        if chosen is not None:
            pull.index_add_(0, rows, -chosen)
        for block, scaled in _scaled_blocks(logits, scale):
            logprobs = scaled.sub_(log_mass[block, None])
            weight = pull[block, None]
            if entropy is not None:
                weight = weight - (logprobs + entropies[block, None]) * entropy[block, None]
            part = torch.exp(logprobs, out=scaled).mul_(weight)
            if chosen is not None:
                first, last = torch.searchsorted(rows, torch.tensor([block.start, block.stop], device=rows.device))
                own = slice(int(first), int(last))
                part.index_put_((rows[own] - block.start, targets[own]), chosen[own], accumulate=True)
            gradient[block] = part.div_(scale if len(scale) == 1 else scale[block])
        return gradient, None, None, None


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits (U, V) are worked on at one time, at least 1: all of them but on a CPU."""
    return _CACHED_ROWS if logits.device.type == "cpu" else max(len(logits), 1)


def _scaled_blocks(logits: Tensor, scale: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `logits` / `scale` in float32, block by block; a block's tensor is overwritten by the next one."""
    rows = rows_at_once(logits)
    buffer = logits.new_empty(min(rows, len(logits)), logits.shape[1], dtype=torch.float32)
    for start in range(0, len(logits), rows):
        block = slice(start, min(start + rows, len(logits)))
        scaled = buffer[: block.stop - start].copy_(logits[block])
        yield block, scaled.div_(scale if len(scale) == 1 else scale[block])


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
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    wanted: Predictions,
    num_chunks: int,
    *,
    with_entropy: bool,
    weights_move: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every target, one of `num_chunks` pieces of the distributions at a time.

    Args:
        head: maps (rows, H) hidden states to (rows, V) logits; called exactly `num_chunks` times, and as often again
            in the backward pass, which recomputes a piece's logits instead of keeping them.
        hidden: (N, H) hidden states; P may be 0, which keeps the gradient path of the head.
        wanted: what is asked for.
        num_chunks: at least 1. Sharded heads gather weights in every call, so all ranks must use the same number.
        with_entropy: let gradients flow through the entropies; without, they are numbers to look at.
        weights_move: the head's weights are taken away between calls (frozen shards), so what a recomputed piece saved
            cannot be compared with what the first pass saved.

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
            check = "none" if weights_move else "default"
            parts.append(checkpoint(one_chunk, *arguments, use_reentrant=False, determinism_check=check))
        else:
            parts.append(one_chunk(*arguments))
        start = stop
    back = torch.argsort(wanted.order)
    return torch.cat([part[0] for part in parts])[back], torch.cat([part[1] for part in parts])[back]
