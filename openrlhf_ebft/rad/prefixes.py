"""Prefixes without their padding, and how many tokens of them a reward model can read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from openrlhf_ebft.core.positions import position_limit

# Tokenizers without a limit report a huge number instead.
_NO_LIMIT = 10**6


def compact_prefix(prefix_ids: torch.Tensor, real: torch.Tensor, keep_last: int | None) -> tuple[torch.Tensor, ...]:
    """Real tokens of every row, moved to the left.

    Args:
        prefix_ids: [B, T] int64.
        real: [B, T] bool, True at real tokens (anywhere in the row).
        keep_last: keep at most this many tokens of a row, its last ones; None keeps all.

    Returns:
        ids [B, L] int64, zero after the row's length; lengths [B] int64.
    """
    counts = real.sum(dim=1)
    dropped = torch.zeros_like(counts) if keep_last is None else (counts - keep_last).clamp_min(0)
    target = real.long().cumsum(dim=1) - 1 - dropped[:, None]
    kept = real & (target >= 0)
    lengths = counts - dropped
    width = int(lengths.max()) if lengths.numel() else 0
    ids = torch.zeros(prefix_ids.size(0), width, dtype=torch.long, device=prefix_ids.device)
    rows = torch.arange(prefix_ids.size(0), device=prefix_ids.device)[:, None].expand_as(prefix_ids)
    ids[rows[kept], target[kept]] = prefix_ids[kept]
    return ids, lengths


def check_known_ids(ids: torch.Tensor, embedding_rows: int, what: str) -> None:
    """Raise ValueError when an id has no row in the reward model's embedding table."""
    if ids.numel() and int(ids.max()) >= embedding_rows:
        raise ValueError(
            f"{what} holds token id {int(ids.max())}, but the reward model's embedding table has {embedding_rows} "
            "rows; use a reward model of the same vocabulary or the text path"
        )


def reward_model_limit(reward_model: nn.Module, tokenizer: Any = None) -> int | None:
    """How many tokens the reward model reads at most (position table, configuration, tokenizer), or None."""
    configured = position_limit(reward_model.config.get_text_config())
    limits = [] if configured is None else [configured]
    for name, module in reward_model.named_modules():
        # RoBERTa-like tables number positions from padding_idx + 1 on, so the first rows hold no position.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    stated = getattr(tokenizer, "model_max_length", None)
    if stated is not None and stated < _NO_LIMIT:
        limits.append(int(stated))
    return min(limits) if limits else None
