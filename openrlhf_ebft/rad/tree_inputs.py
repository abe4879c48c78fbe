"""Inputs of one reward-model forward over a cached prefix, new prefix tokens and the candidates of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from openrlhf_ebft.rad.tree_cache import visible_slots


@dataclass
class TreeInputs:
    """One forward: M new prefix tokens, then K candidates, over P cached slots.

    Attributes:
        input_ids: [B, M + K] int64.
        position_ids: [B, M + K] int64; every candidate of a row stands right after the row's prefix.
        attention_mask: additive mask [B, 1, M + K, S] in the model's dtype, S = visible_slots(P + M + K), or a dict
            of such masks per kind of attention layer.
        new_valid: [B, M] bool, False where a row needs fewer than M new tokens.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | dict[str, torch.Tensor]
    new_valid: torch.Tensor


def build_inputs(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    candidate_ids: torch.Tensor,
    valid: torch.Tensor,
    covered: torch.Tensor,
    windows: AttentionWindows,
    dtype: torch.dtype,
) -> TreeInputs:
    """Ids, positions and masks of a step.

    Args:
        tokens: [B, L] int64, prefixes right-padded.
        lengths: [B] int64.
        candidate_ids: [B, K] int64.
        valid: [B, P] bool, cached slots that hold the first `covered[b]` tokens of row b, in order.
        covered: [B] int64.
        windows: the model's kinds of attention layers.
        dtype: of the mask.
    """
    batch, candidates = candidate_ids.shape
    new = int((lengths - covered).max()) if batch else 0
    number = lengths[:, None] - new + torch.arange(new, device=tokens.device)[None, :]  # token number, right-aligned
    new_valid = number >= covered[:, None]
    new_ids = tokens.gather(1, number.clamp(0, max(tokens.size(1) - 1, 0))) if new else tokens[:, :0]
    position_ids = torch.cat([number.clamp_min(0), lengths[:, None].expand(batch, candidates)], dim=1)

    queries = new + candidates
    order = torch.arange(queries, device=tokens.device)
    # A query sees the new tokens up to itself; a candidate sees all new tokens, and of the candidates only itself.
    among_new = (order[None, :] <= order[:, None]) & (order < new)[None, :]
    itself = order[None, :] == order[:, None]
    key_valid = torch.cat([new_valid, new_valid.new_ones(batch, candidates)], dim=1)
    own = (among_new[None] & key_valid[:, None, :]) | itself[None]
    allowed = torch.cat([valid[:, None, :].expand(batch, queries, valid.size(1)), own], dim=2)

    cached_positions = (valid.long().cumsum(dim=1) - 1).clamp_min(0)
    key_positions = torch.cat([cached_positions, position_ids], dim=1)
    unused = visible_slots(key_positions.size(1)) - key_positions.size(1)
    allowed = nn.functional.pad(allowed, (0, unused), value=False)
    key_positions = nn.functional.pad(key_positions, (0, unused))
    return TreeInputs(
        input_ids=torch.cat([new_ids, candidate_ids], dim=1),
        position_ids=position_ids,
        attention_mask=windows.masks(allowed, position_ids, key_positions, dtype),
        new_valid=new_valid,
    )


class AttentionWindows:
    """Which masks a model's layers take: one, one cut to a sliding window, or one per kind of layer.

    Raises:
        ValueError: a kind of layer whose state is not one key and value per token.
    """

    def __init__(self, config: Any) -> None:
        kinds = sorted(set(getattr(config, "layer_types", None) or []))
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention", "attention")]
        if unknown:
            raise ValueError(f"its layers of kind {', '.join(unknown)} keep no key and value per token")
        if "local" in (getattr(config, "attention_layers", None) or []):
            raise ValueError("its local attention layers cut their window by slot, not by position")
        self.window: int | None = getattr(config, "sliding_window", None)
        self.per_kind = "sliding_attention" in kinds
        if kinds and not self.per_kind:
            self.window = None

    def masks(
        self, allowed: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks from allowed [B, Q, S] bool and the positions of queries [B, Q] and keys [B, S]."""
        full = _additive(allowed, dtype)
        if self.window is None:
            return full
        near = query_positions[:, :, None] - key_positions[:, None, :] < self.window
        sliding = _additive(allowed & near, dtype)
        return {"full_attention": full, "sliding_attention": sliding} if self.per_kind else sliding


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Additive, because eager attention adds the mask to its scores: a boolean one would be silently wrong there.
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
