"""Attention of a few queries over many cached keys, without repeating the keys for grouped heads.

transformers' `sdpa` repeats every cached key and value for each query head of its group when there is a mask, and the
CPU kernel behind it is slow for masked steps: about a quarter of a step. Registered as an attention implementation of
transformers; everything that is not a tree forward is handed to `sdpa` unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rad_tree"
# Above this many queries (the first step of a long prompt) the score matrix would be larger than what it saves.
MOST_QUERIES = 256
# Extras that some models add to their attention; they change the formula.
_EXTRAS = ("softcap", "s_aux", "position_bias")


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """softmax(query key^T * scaling + mask) value, softmax in float32.

    Args:
        module: the attention layer.
        query: [B, H, Q, D].
        key, value: [B, KV, S, D]; head h reads key head h // (H / KV).
        attention_mask: [B, 1, Q, S] additive; anything else goes to `sdpa`.
        scaling: default D ** -0.5.

    Returns:
        [B, Q, H, D] and None.
    """
    extras = any(kwargs.get(name) is not None for name in _EXTRAS)
    additive = attention_mask is not None and attention_mask.is_floating_point()
    if extras or not additive or query.size(2) > MOST_QUERIES:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, queries, width = query.shape
    groups, slots = key.size(1), key.size(2)
    grouped = query.reshape(batch, groups, heads // groups * queries, width)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * (width**-0.5 if scaling is None else scaling)
    masked = scores.view(batch, groups, heads // groups, queries, slots).float() + attention_mask[:, :, None].float()
    weights = torch.softmax(masked, dim=-1).to(value.dtype).view_as(scores)
    mixed = torch.matmul(weights, value).view(batch, heads, queries, value.size(3))
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
