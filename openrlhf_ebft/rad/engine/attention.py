"""Attention of a forward over prefixes that lie in blocks: new prefix tokens, and candidates that see prefix and self.

Registered as an attention implementation of transformers. Outside of `running` it is `rad_tree`, which is `sdpa` in
everything but tree forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from openrlhf_ebft.rad.engine.blocks import BLOCK
from openrlhf_ebft.rad.engine.cache import CandidateGroup, Forward, Segment
from openrlhf_ebft.rad.tree_attention import tree_attention

NAME = "rad_paged"
_ACTIVE = threading.local()


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """While open, attention of this thread reads the forward's prefixes."""
    _ACTIVE.forward = forward
    try:
        yield
    finally:
        _ACTIVE.forward = None


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of T tokens of several requests.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key, value: [1, KV, T, D] of the same tokens; those of new prefix tokens are in the cache already.
        attention_mask: not read: the forward says who sees what.
        scaling: default D ** -0.5.
        kwargs: `sliding_window`, the number of tokens that a token sees, itself included.

    Returns:
        [1, T, H, D] and None.
    """
    forward: Forward | None = getattr(_ACTIVE, "forward", None)
    if forward is None:
        return tree_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    window = kwargs.get("sliding_window") if forward.windowed else None
    forward.windows_seen.add(window)
    scale = query.size(3) ** -0.5 if scaling is None else scaling
    output = query.new_empty(1, query.size(2), query.size(1), value.size(3))
    for segment in forward.segments:
        end = segment.start + segment.count
        mixed = _segment_attention(forward, segment, query[:, :, segment.start : end], scale, window)
        output[:, segment.start : end] = mixed.transpose(1, 2)
    for group in forward.groups:
        part = slice(group.start, group.start + group.size)
        own = (query[0, :, part] * scale, key[0, :, part], value[0, :, part])
        if group.padded is None or group.kept is None:
            output[0, part] = _group_attention(forward, group, *own, window)
        else:
            padded = (states.index_select(1, group.padded) for states in own)
            output[0, part] = _group_attention(forward, group, *padded, window)[group.kept]
    return output, None


def _segment_attention(
    forward: Forward, segment: Segment, query: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """[1, H, M, D] of M new tokens; query [1, H, M, D]."""
    keys = _stored(forward.cache.keys[forward.layer], segment.table)
    values = _stored(forward.cache.values[forward.layer], segment.table)
    mask = forward.shared.get((segment.start, window))
    if mask is None:
        own = segment.position + torch.arange(segment.count, device=query.device)[:, None]
        theirs = torch.arange(keys.size(2), device=query.device)[None, :]
        mask = theirs <= own
        if window is not None:
            mask &= own - theirs < window
        forward.shared[(segment.start, window)] = mask
    return nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=keys.size(1) != query.size(1)
    )


def _stored(buffer: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[1, heads, nb * BLOCK, width] of one prefix from a layer's buffer [blocks, heads, BLOCK, width]."""
    return buffer[table].transpose(0, 1).flatten(1, 2)[None]


def _group_attention(
    forward: Forward,
    group: CandidateGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """[N, H, D] of N = R * K candidates, each of which sees its row's prefix and itself.

    Args:
        query: [H, N, D], scaled.
        key, value: [KV, N, D].

    The last slot of a row's blocks is beyond every prefix; it stands for the candidate itself.
    """
    rows, k = group.rows, group.k
    heads, groups, width = query.size(0), key.size(0), query.size(2)
    per_group = heads // groups
    keys = _gathered(forward, group, forward.cache.keys[forward.layer])
    values = _gathered(forward, group, forward.cache.values[forward.layer])
    values[:, :, -1] = 0
    own_keys = key.view(groups, rows, k, width).transpose(0, 1)[:, :, None]  # [R, KV, 1, K, D]
    own_values = value.view(groups, rows, k, -1).transpose(0, 1)[:, :, None]
    grouped = query.view(groups, per_group, rows, k, width).permute(2, 0, 1, 3, 4)  # [R, KV, G, K, D]
    scores = torch.matmul(grouped.reshape(rows, groups, per_group * k, width), keys.transpose(2, 3))
    scores += _length_mask(forward, group, scores, window)
    scores[..., -1] = (grouped * own_keys).sum(-1).flatten(2)
    weights = torch.softmax(scores, dim=-1)  # accumulates in float32 whatever the dtype
    mixed = torch.matmul(weights, values).view(rows, groups, per_group, k, -1)
    mixed += weights[..., -1].view(rows, groups, per_group, k, 1) * own_values
    return mixed.permute(0, 3, 1, 2, 4).reshape(rows * k, heads, -1)


def _gathered(forward: Forward, group: CandidateGroup, buffer: torch.Tensor) -> torch.Tensor:
    """[R, heads, nb * BLOCK, width] of a group's prefixes."""
    blocks, heads, _, width = buffer.shape
    rows, number = group.table.shape
    index = forward.shared.get(("gather", group.start, heads))
    if index is None:
        index = (group.table[:, None, :] * heads + torch.arange(heads, device=buffer.device)[None, :, None]).flatten()
        forward.shared[("gather", group.start, heads)] = index
    return buffer.view(blocks * heads, BLOCK * width).index_select(0, index).view(rows, heads, number * BLOCK, width)


def _length_mask(forward: Forward, group: CandidateGroup, scores: torch.Tensor, window: int | None) -> torch.Tensor:
    """[R, 1, 1, S] additive: 0 where a slot holds a token of the row's prefix within the window, else -inf."""
    mask = forward.shared.get(("length", group.start, window))
    if mask is None:
        slot = torch.arange(scores.size(3), device=scores.device)[None, :]
        hidden = slot >= group.lengths[:, None]
        if window is not None:
            hidden |= group.lengths[:, None] - slot >= window
        mask = torch.zeros(hidden.shape, dtype=scores.dtype, device=scores.device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        forward.shared[("length", group.start, window)] = mask
    return mask


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
