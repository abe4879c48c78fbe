"""Log-probabilities of given tokens without holding all logits: chunks of tokens, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor | float, *, entropy_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, at the sampling temperature.

    Args:
        logits: (P, V) any float dtype; not modified.
        targets: (P,) int64.
        temperature: scalar or (P,), > 0; both results describe softmax(logits / temperature).
        entropy_grad: whether the entropy carries a gradient; without, a backward pass does not touch it.

    Returns:
        (P,) float32 log-probabilities and (P,) float32 entropies, in nats.
    """
    scaled = logits.float() / torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)
    normaliser = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    # Last, so that a recomputation for the backward pass stops before it when it carries no gradient.
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = normaliser - (torch.softmax(scaled, dim=-1) * scaled).sum(-1)
    return chosen, entropy


def chunked_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    num_chunks: int,
    *,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of head(hidden), one of `num_chunks` pieces at a time.

    Args:
        head: maps (P, H) hidden states to (P, V) logits; called exactly `num_chunks` times, and as often again in the
            backward pass, which recomputes a piece's logits instead of keeping them.
        hidden: (P, H) states of the predicting tokens; P may be 0, which keeps the gradient path of the head.
        targets: (P,) int64.
        temperature: (P,) float32.
        num_chunks: at least 1. Sharded heads gather weights in every call, so all ranks must use the same number.
        entropy_grad: as in `token_logprobs`.
    """

    def one_chunk(rows: Tensor, row_targets: Tensor, row_temperature: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(rows), row_targets, row_temperature, entropy_grad=entropy_grad)

    parts = []
    pieces = zip(*(tensor.tensor_split(num_chunks) for tensor in (hidden, targets, temperature)), strict=True)
    for arguments in pieces:
        if torch.is_grad_enabled():
            parts.append(checkpoint(one_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(one_chunk(*arguments))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
