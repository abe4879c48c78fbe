"""Which tokens of a step are candidates."""

from __future__ import annotations

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
        probability = torch.softmax(scores.float(), dim=-1).gather(1, ids)
        before = probability.cumsum(dim=-1) - probability
        valid &= before < p
        valid[:, 0] |= best[:, 0] > float("-inf")
    if policy != "top_k":
        used = max(int(valid.sum(dim=-1).max()) if valid.numel() else 0, 1)
        ids, valid = ids[:, :used], valid[:, :used]
    return ids, valid


def check_policy(policy: str, k: int | None, p: float | None, max_candidates: int | None) -> None:
    """Raise ValueError for an unknown policy or a missing or impossible k, p or max_candidates."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if policy == "top_k" and (k is None or k < 1):
        raise ValueError(f"policy top_k needs k >= 1, got {k}")
    if policy == "top_p" and (p is None or not 0 < p <= 1):
        raise ValueError(f"policy top_p needs p in (0, 1], got {p}")
    if max_candidates is not None and max_candidates < 1:
        raise ValueError(f"max_candidates must be at least 1, got {max_candidates}")
