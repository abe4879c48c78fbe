"""Drawing tokens from logits, with a generator per completion, so that batching cannot change a sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openrlhf_ebft.core.experience import SamplingSettings


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


def pick_tokens(logprobs: Tensor, uniforms: Tensor, sampling: SamplingSettings) -> Tensor:
    """Inverts the cumulative distribution at `uniforms`; takes the most likely token at temperature 0.

    Args:
        logprobs: (rows, vocabulary) from `sampler_logprobs`.
        uniforms: (rows,) float64 in [0, 1).

    Returns:
        (rows,) int64; never a token of probability 0, since the distribution's cumulative sum does not rise there.
    """
    if sampling.temperature == 0:
        return logprobs.argmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniforms.to(logprobs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
