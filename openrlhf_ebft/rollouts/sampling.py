"""Drawing tokens from logits, with a generator per completion, so that batching cannot change a sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.core.logprobs import block_buffer, rows_at_once, softmax_inplace

_BLOCK = 256  # tokens whose probabilities are summed before the sums are searched


def sampler_logits(logits: Tensor, sampling: SamplingSettings, space: Tensor | None = None) -> Tensor:
    """Logits of the distribution that is sampled from: temperature, then top-k, then top-p.

    At temperature 0 they are the plain logits, of which the largest is taken.

    Args:
        logits: (rows, vocabulary), any floating dtype; not modified.
        space: float32 of that shape that may be overwritten with the result; default: new memory.

    Returns:
        (rows, vocabulary) float32, not shared with `logits`; -inf for tokens that top-k or top-p excludes.
    """
    logits = logits.to(torch.float32, copy=True) if space is None else space.copy_(logits)
    if sampling.temperature == 0:
        return logits
    logits = logits.mul_(1 / sampling.temperature)
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if sampling.top_p < 1:
        logits = _keep_nucleus(logits, sampling.top_p)
    return logits


def _keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest tokens whose probabilities sum to at least `top_p`; one token is always kept."""
    ordered, order = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    dropped = mass_before >= top_p
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def draw_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """One stream of uniform numbers per completion.

    Drawn on the CPU, so that a seed gives the same stream on every device, and with 24 random bits, so that a number
    times a total in float64 stays below the total.

    Returns:
        (len(seeds), length) float64 in [0, 1).
    """
    streams = [torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(streams).double()


def draw_tokens(
    logits: Tensor, uniforms: Tensor, sampling: SamplingSettings, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative distribution at `uniforms`; takes the most likely token at temperature 0.

    Args:
        logits: (D, vocabulary), any floating dtype.
        uniforms: (N,) float64 in [0, 1).
        sampling: what `sampler_logits` describes.
        rows: (N,) int64 in rising order, which distribution each number draws from; default: one a distribution.

    Returns:
        (N,) int64 tokens, never one of probability 0, and (N,) float32 log-probabilities of the distribution that
        was sampled from, in nats; both on the device of `logits`.
    """
    device = logits.device
    uniforms = uniforms.to(device)
    rows = torch.arange(len(logits), device=device) if rows is None else rows
    block = rows_at_once(logits)
    starts = range(0, len(logits), block)
    edges = torch.searchsorted(rows, torch.tensor([*starts, len(logits)], device=device)).tolist()
    space = block_buffer(logits)
    drawn = []
    for start, first, last in zip(starts, edges, edges[1:], strict=False):
        part = logits[start : start + block]
        ready = sampler_logits(part, sampling, space[: len(part)])
        drawn.append(_draw_block(ready, rows[first:last] - start, uniforms[first:last], sampling))
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def _draw_block(logits: Tensor, rows: Tensor, uniforms: Tensor, sampling: SamplingSettings) -> tuple[Tensor, Tensor]:
    """`draw_tokens` of (D, vocabulary) float32 `sampler_logits`, which are overwritten."""
    # The place of the largest is searched only where it is needed: with it, the search is several times as slow.
    likeliest = logits.argmax(-1) if sampling.temperature == 0 else None
    masses = softmax_inplace(logits)
    # Sums of blocks find the block, one block's cumulative sum the token: a float64 copy of everything is slow.
    padding = -masses.shape[-1] % _BLOCK
    blocks = nn.functional.pad(masses, (0, padding)) if padding else masses
    blocks = blocks.unflatten(-1, (-1, _BLOCK))  # (D, blocks, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)[rows]  # (N, blocks)
    if likeliest is not None:
        tokens = likeliest[rows]  # by logit: rounding may make two masses equal
    else:
        fraction, number = _invert(ends, uniforms)
        _, place = _invert(blocks[rows, number].double().cumsum(-1), fraction)
        tokens = number * _BLOCK + place
    return tokens, torch.log(masses[rows, tokens] / ends[:, -1]).float()


def _invert(cumulative: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where `uniforms` (N,) of the total fall in cumulative sums (N, K), and how far into that entry's own share.

    Returns:
        (N,) float64 fraction in [0, 1) of the entry, (N,) int64 entry, never one without a share.
    """
    target = uniforms[:, None] * cumulative[:, -1:]
    entry = torch.searchsorted(cumulative, target, right=True)
    end = cumulative.gather(1, entry)
    start = torch.where(entry > 0, cumulative.gather(1, (entry - 1).clamp(min=0)), 0.0)
    fraction = ((target - start) / (end - start)).clamp(0, 1 - 2**-50)
    return fraction[:, 0], entry[:, 0]
