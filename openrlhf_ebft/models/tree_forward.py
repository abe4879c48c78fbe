"""Runs a transformers backbone over a batch of rollout trees, whichever way its attention can do it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf_ebft.core.attention import AttentionMode, AttentionSpec, MaskKind, attention_masks, unroll_rows
from openrlhf_ebft.core.block_masks import tree_block_masks
from openrlhf_ebft.core.split_attention import DistinctTokens, TreeSplit
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.split_attention import BatchLayout, TreeLayout

Masks = Tensor | BlockMask | dict[str, Tensor] | dict[str, BlockMask] | TreeLayout
"""What keeps tokens apart: a mask, masks by attention type, or the layout of split attention."""

Backbone = Callable[[Tensor, Masks, Tensor], Tensor]
"""(input_ids, masks, position_ids) -> hidden states (rows, tokens, D)."""


def mask_arguments(masks: Masks | None) -> dict[str, Any]:
    """Keyword arguments of a transformers model's forward pass that carry `masks`."""
    if isinstance(masks, TreeLayout):
        return {"tree_layout": masks}
    return {} if masks is None else {"attention_mask": masks}


def set_flex_attention(model: PreTrainedModel) -> None:
    """Makes the model attend through flex kernels. Raises ValueError for a model that transformers has none for."""
    try:
        model.set_attn_implementation("flex_attention")
    except ValueError as error:
        raise ValueError(
            f"model type {model.config.model_type!r} does not take flex attention; set model.attention to sdpa or rows"
        ) from error


def require_tree_attention(model: PreTrainedModel) -> None:
    """Raises ValueError for a model in which more than a mask and positions tells tokens of different branches apart.

    Recurrent layers and convolutions read tokens in the order in which they stand, and some models number positions
    themselves: with a tree they would give wrong states without an error.
    """
    why = "reads tokens one after the other (a state, not attention alone)" if model._is_stateful else None
    if why is None and "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        why = "takes no position ids"
    if why is not None:
        raise ValueError(f"model type {model.config.model_type!r} {why}; set model.attention to rows")


def rows_spec(config: PretrainedConfig, implementation: str) -> AttentionSpec | None:
    """`attention_spec` for rows; None where layers take no masks, which packed documents alone need."""
    try:
        return attention_spec(config, implementation)
    except ValueError:
        return None


def attention_spec(config: PretrainedConfig, implementation: str) -> AttentionSpec:
    """Reads from a model's config which masks its layers expect.

    Args:
        config: configuration of the (text) model.
        implementation: transformers' attention implementation; `eager` adds the mask to the scores, so it must get
            an additive one (a boolean mask is added as 0 and 1 without an error).
    """
    kind: MaskKind = "additive" if implementation == "eager" else "boolean"
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = sorted(set(getattr(config, "layer_types", None) or []))
    if not types:
        return AttentionSpec(kind, (("", window),))
    unknown = [name for name in types if name not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ValueError(
            f"model type {config.model_type!r} has layers of type {unknown}, which take no tree mask; "
            "set model.attention to rows"
        )
    windows = tuple((name, window if name == "sliding_attention" else None) for name in types)
    # One type for all layers means that the model builds one mask; a dict is understood only where types are mixed.
    return AttentionSpec(kind, windows if len(windows) > 1 else (("", windows[0][1]),))


def forward_tree(
    backbone: Backbone, batch: TreeBatch, mode: AttentionMode, spec: AttentionSpec | None, dtype: torch.dtype
) -> Tensor:
    """Hidden states of every tree token, (b, T, D); padding tokens hold arbitrary values.

    Args:
        backbone: the model's blocks, without its head.
        batch: trees on any device; moved nowhere.
        mode: `rows` runs one causal row for each branch, all others run the tree in one sequence.
        spec: what masks the model's attention expects; None in `split`, which has none, and in `rows` for a model
            whose layers take none.
        dtype: dtype of additive masks.
    """
    if mode == "split":
        return _forward_split(backbone, batch)
    if spec is None and mode != "rows":
        raise ValueError(f"attention mode {mode} needs an attention spec")
    if mode == "flex":
        return backbone(batch.input_ids, tree_block_masks(batch, spec), batch.position_ids)
    if mode != "rows":
        masks = attention_masks(batch.allowed(), batch.position_ids, spec, dtype)
        return backbone(batch.input_ids, masks, batch.position_ids)
    rows = unroll_rows(batch)
    mask: Tensor | dict[str, Tensor] = rows.valid.long()
    if rows.allowed is not None:
        if spec is None:
            raise ValueError("packed documents need masks, which layers of this model do not take")
        mask = attention_masks(rows.allowed, rows.position_ids, spec, dtype)
    hidden = backbone(rows.input_ids, mask, rows.position_ids)
    return hidden.flatten(0, 1)[rows.source].view(*batch.input_ids.shape, -1)


def _forward_split(backbone: Backbone, batch: TreeBatch) -> Tensor:
    distinct = DistinctTokens.of(batch)
    layout = BatchLayout(TreeSplit.from_batch(batch, distinct))
    if distinct is None:
        return backbone(batch.input_ids, layout, batch.position_ids)
    ids, positions = (grid.gather(1, distinct.sources) for grid in (batch.input_ids, batch.position_ids))
    return distinct.spread(backbone(ids, layout, positions))
