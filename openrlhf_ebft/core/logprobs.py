"""Log-probabilities of given tokens without holding all logits: chunks of tokens, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_PIECE_BLOCK = 32
_CACHED_ROWS = 16  # distributions that a CPU works on at one time: their float32 copies stay in its cache


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
    scale = _as_column(temperature, logits)
    return _differentiable(logits, scale, rows, targets, _normalizers(logits, scale), with_entropy)


def _as_column(temperature: Tensor | float, logits: Tensor) -> Tensor:
    return torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)


def _differentiable(
    logits: Tensor,
    scale: Tensor,
    rows: Tensor,
    targets: Tensor,
    known: tuple[Tensor, Tensor],
    with_entropy: bool,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    chosen, entropy = _TokenLogprobs.apply(logits, scale, rows, targets, *known, overwrite)
    return chosen, entropy[rows] if with_entropy else entropy[rows].detach()


@torch.no_grad()
def _normalizers(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the sum of exp(logits / scale), and entropy: (U,) float32 each."""
    log_mass, entropy = logits.new_empty(2, len(logits), dtype=torch.float32)
    buffer = block_buffer(logits)
    for block, scaled in _scaled_blocks(logits, scale):
        largest = scaled.amax(-1, keepdim=True)
        # The kernel of softmax takes half the time of exp, on CPUs.
        probabilities = torch.softmax(scaled.sub_(largest), dim=-1, out=buffer[: len(scaled)])
        log_of_mass = -probabilities.amax(-1).log()  # of the sum of exp(scaled)
        log_mass[block] = largest[:, 0] + log_of_mass
        entropy[block] = log_of_mass - scaled.mul_(probabilities).sum(-1)
    return log_mass, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies without a float32 copy of all logits: block by block, forward and backward.

    Autograd's own would keep that copy, make a zero tensor of its size for the chosen entries and several more on the
    way. With `overwrite` the gradient of the logits takes their place; a second backward pass is then an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        scale: Tensor,
        rows: Tensor,
        targets: Tensor,
        log_mass: Tensor,
        entropy: Tensor,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        """logits (U, V), scale (U or 1, 1) temperatures, rows (rising) and targets (P,), `_normalizers` (U,) each.

        Returns (P,) and (U,) float32.
        """
        chosen = logits[rows, targets].float() / scale.expand(len(logits), 1)[rows, 0] - log_mass[rows]
        ctx.save_for_backward(logits, scale, log_mass, entropy, rows, targets)
        ctx.set_materialize_grads(False)
        ctx.overwrite = overwrite
        return chosen, entropy.clone()

    @staticmethod
    def backward(ctx: Any, chosen: Tensor | None, entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d chosen = onehot - p and d entropy = -p (log p + entropy), both divided by the temperature."""
        logits, scale, log_mass, entropies, rows, targets = ctx.saved_tensors
        gradient = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        pull = torch.zeros_like(log_mass)  # what each row's probabilities are multiplied with
        if chosen is not None:
            pull.index_add_(0, rows, -chosen)
        for block, scaled in _scaled_blocks(logits, scale):
            weight = pull[block, None]
            if entropy is not None:
                logprobs = scaled - log_mass[block, None]
                weight = weight - (logprobs + entropies[block, None]) * entropy[block, None]
            part = softmax_inplace(scaled).mul_(weight)
            if chosen is not None:
                first, last = torch.searchsorted(rows, torch.tensor([block.start, block.stop], device=rows.device))
                own = slice(int(first), int(last))
                part.index_put_((rows[own] - block.start, targets[own]), chosen[own], accumulate=True)
            gradient[block] = part.mul_(_inverse(scale, block))
        return gradient, None, None, None, None, None, None


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits (U, V) are worked on at one time, at least 1: all of them but on a CPU."""
    return _CACHED_ROWS if logits.device.type == "cpu" else max(len(logits), 1)


def block_buffer(logits: Tensor) -> Tensor:
    """Room (rows_at_once, V) float32 for rows of logits (U, V), one for all blocks of them.

    A tensor for each block would be memory that the system hands out and clears anew every time.
    """
    return logits.new_empty(min(rows_at_once(logits), len(logits)), logits.shape[1], dtype=torch.float32)


def softmax_inplace(rows: Tensor) -> Tensor:
    """Softmax of rows (U, V) float32 that may be overwritten."""
    if rows.device.type == "cpu":
        return torch.softmax(rows, dim=-1, out=rows)  # this kernel reads an element before it writes it
    return rows.sub_(rows.logsumexp(-1, keepdim=True)).exp_()


def _scaled_blocks(logits: Tensor, scale: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `logits` / `scale` in float32, block by block; a block's tensor is overwritten by the next one."""
    rows = rows_at_once(logits)
    buffer = block_buffer(logits)
    for start in range(0, len(logits), rows):
        block = slice(start, min(start + rows, len(logits)))
        scaled = buffer[: block.stop - start].copy_(logits[block])
        yield block, scaled.mul_(_inverse(scale, block))


def _inverse(scale: Tensor, block: slice) -> Tensor:
    """One over the temperatures of a block: multiplying takes a fifth of the time of dividing."""
    return (scale if len(scale) == 1 else scale[block]).reciprocal()


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
        head: maps (rows, H) hidden states to (rows, V) logits, which the backward pass overwrites; called exactly
            `num_chunks` times, and again for every piece but the last in the backward pass, which recomputes a piece's
            logits instead of keeping them.
        hidden: (N, H) hidden states; P may be 0, which keeps the gradient path of the head.
        wanted: what is asked for.
        num_chunks: at least 1. Sharded heads gather weights in every call, so all ranks must use the same number.
        with_entropy: let gradients flow through the entropies; without, they are numbers to look at.
        weights_move: the head's weights are taken away between calls (frozen shards), so the last piece is recomputed
            as well, and what a recomputed piece saved cannot be compared with what the first pass saved.

    Returns:
        (P,) float32 log-probabilities and (P,) float32 entropies in nats, in the caller's order of targets.
    """

    def piece_logprobs(
        rows: Tensor, temperature: Tensor, source: Tensor, targets: Tensor, known: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        logits, scale = head(rows), _as_column(temperature, rows)
        if not known:  # the recomputation in the backward pass finds what the first pass has left
            known.append(_normalizers(logits, scale))
        return _differentiable(logits, scale, source, targets, known[0], with_entropy, overwrite=True)

    device = hidden.device
    edges = _piece_edges(wanted.states.numel(), num_chunks)
    places = torch.searchsorted(wanted.source, torch.tensor(edges, device=device)).tolist()
    parts = []
    for number in range(num_chunks):
        (start, stop), (first, last) = edges[number : number + 2], places[number : number + 2]
        known: list[tuple[Tensor, Tensor]] = []
        arguments = (
            hidden[wanted.states[start:stop]],
            wanted.temperature[start:stop],
            wanted.source[first:last] - start,
            wanted.targets[first:last],
            known,
        )
        # The last piece's backward pass comes first, when its logits would have to be there anyway.
        is_kept = number == num_chunks - 1 and not weights_move
        if torch.is_grad_enabled() and not is_kept:
            check = "none" if weights_move else "default"
            parts.append(checkpoint(piece_logprobs, *arguments, use_reentrant=False, determinism_check=check))
        else:
            parts.append(piece_logprobs(*arguments))
    back = torch.argsort(wanted.order)
    return torch.cat([part[0] for part in parts])[back], torch.cat([part[1] for part in parts])[back]


def _piece_edges(count: int, num_pieces: int) -> list[int]:
    """Where `num_pieces` pieces of `count` rows begin and end; whole blocks, which matrix products are fastest with."""
    size = -(-count // num_pieces)
    size = -(-size // _PIECE_BLOCK) * _PIECE_BLOCK
    return [min(number * size, count) for number in range(num_pieces + 1)]
