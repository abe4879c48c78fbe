"""Drawing tokens from logits, with a generator per completion, so that batching cannot change a sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from openrlhf_ebft.core.experience import SamplingSettings

_BLOCK = 256  # tokens whose probabilities are summed before the sums are searched


def sampler_logprobs(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """Log-probabilities of the distribution that is sampled from: temperature, then top-k, then top-p, renormalised.

    At temperature 0 it is the log-softmax of the plain logits, of which the largest is taken.

    Args:
        logits: (rows, vocabulary), any floating dtype; computed in float32.

    Returns:
        (rows, vocabulary) float32; -inf for tokens that top-k or top-p excludes.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if sampling.top_p < 1:
        logits = _keep_nucleus(logits, sampling.top_p)
    return logits.log_softmax(-1)


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


def pick_tokens(logprobs: Tensor, uniforms: Tensor, sampling: SamplingSettings, rows: Tensor | None = None) -> Tensor:
    """Inverts the cumulative distribution at `uniforms`; takes the most likely token at temperature 0.

    Args:
        logprobs: (D, vocabulary) from `sampler_logprobs`.
        uniforms: (N,) float64 in [0, 1).
        rows: (N,) int64, which distribution each number draws from; default: one number a distribution.

    Returns:
        (N,) int64; never a token of probability 0, since the distribution's cumulative sum does not rise there.
    """
    rows = torch.arange(len(logprobs), device=logprobs.device) if rows is None else rows
    if sampling.temperature == 0:
        return logprobs.argmax(-1)[rows]
    # Sums of blocks find the block, one block's cumulative sum the token: a float64 copy of everything is slow.
    padding = -logprobs.shape[-1] % _BLOCK
    blocks = nn.functional.pad(logprobs.exp(), (0, padding)).unflatten(-1, (-1, _BLOCK))  # (D, blocks, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)[rows]  # (N, blocks)
    fraction, number = _invert(ends, uniforms.to(logprobs.device))
    _, place = _invert(blocks[rows, number].double().cumsum(-1), fraction)
    return number * _BLOCK + place


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
