"""Log-probabilities of given tokens without holding all logits: chunks of tokens, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, at the sampling temperature.

    Args:
        logits: (P, V) any float dtype; not modified.
        targets: (P,) int64.
        temperature: scalar or (P,), > 0; both results describe softmax(logits / temperature).

    Returns:
        (P,) float32 log-probabilities and (P,) float32 entropies, in nats.
    """
    scaled = logits.float() / torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)
    normaliser = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    entropy = normaliser - (torch.softmax(scaled, dim=-1) * scaled).sum(-1)
    return chosen, entropy


def chunked_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperature: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of head(hidden), at most `chunk_tokens` rows of logits alive at a time.

    Args:
        head: maps (P, H) hidden states to (P, V) logits.
        hidden: (P, H) states of the predicting tokens.
        targets: (P,) int64.
        temperature: (P,) float32.
        chunk_tokens: rows of one chunk; the backward pass recomputes a chunk's logits instead of keeping them.
    """

    def one_chunk(rows: Tensor, row_targets: Tensor, row_temperature: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(rows), row_targets, row_temperature)

    if hidden.shape[0] == 0:
        # Keeps the graph whole, so that a batch without targets still has (zero) gradients for every parameter.
        zero = head(hidden).float().sum() + hidden.float().sum()
        return zero.expand(0), zero.expand(0)
    parts = []
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        arguments = (hidden[rows], targets[rows], temperature[rows])
        if torch.is_grad_enabled():
            parts.append(checkpoint(one_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(one_chunk(*arguments))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
