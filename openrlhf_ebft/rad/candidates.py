"""Which tokens of a step are candidates."""

from __future__ import annotations

from numbers import Integral, Real

import torch

POLICIES = ("top_k", "top_p", "surviving")


def select_candidates(
    scores: torch.Tensor,
    policy: str,
    *,
    k: int | None = None,
    p: float | None = None,
    max_candidates: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of every row, best score first.

    Args:
        scores: [B, V] scores (logits) of the step; -inf tokens are never candidates.
        policy: `top_k` (the k best; the whole vocabulary when k is larger), `top_p` (the smallest set of best tokens
            whose probabilities sum to at least p), `surviving` (every token above -inf).
        k: for `top_k`.
        p: for `top_p`, in (0, 1].
        max_candidates: keep at most this many of a row, whatever the policy.

    Returns:
        ids [B, K] int64 and valid [B, K] bool; rows with fewer candidates than K are filled with invalid entries.
    """
    vocabulary = scores.size(1)
    most = vocabulary if policy != "top_k" else min(int(k), vocabulary)
    if max_candidates is not None:
        most = min(most, max_candidates)
    best, ids = torch.topk(scores, most, dim=-1)
    valid = best > float("-inf")
    if policy == "top_p":
        valid &= _before(scores, ids) < p
    if policy != "top_k":
        used = max(int(valid.sum(dim=-1).max()) if valid.numel() else 0, 1)
        ids, valid = ids[:, :used], valid[:, :used]
    return ids, valid


def _before(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[B, K] float64: what the better tokens of `ids` [B, K] have of the probability of `scores` [B, V]; below 1.

    In float32 thousands of unlikely tokens of a large vocabulary would add nothing to the sum or take it above 1.
    """
    probability = torch.softmax(scores.double(), dim=-1).gather(1, ids)
    before = torch.nn.functional.pad(probability, (1, 0))[:, :-1].cumsum(dim=-1)
    # Even the last one comes before the whole: p = 1 keeps every token.
    return before.clamp_max(1 - torch.finfo(torch.float64).eps)


def check_policy(policy: str, k: int | None, p: float | None, max_candidates: int | None) -> None:
    """Raise ValueError for an unknown policy or a missing or impossible k, p or max_candidates."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if policy == "top_k" and not _is_count(k):
        raise ValueError(f"policy top_k needs a whole number k >= 1, got {k!r}")
    if policy == "top_p" and not (isinstance(p, Real) and 0 < p <= 1):
        raise ValueError(f"policy top_p needs p in (0, 1], got {p!r}")
    if max_candidates is not None and not _is_count(max_candidates):
        raise ValueError(f"max_candidates must be a whole number, at least 1, got {max_candidates!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
