"""Tree attention for transformers models: masks for a padded grid, or one causal row for each branch.

`sdpa` and `eager` run the whole tree in one sequence under a custom mask; `rows` runs every branch behind its own copy
of the context, for attention kernels that know only causal masks. `split` (split_attention.py) and `flex`
(block_masks.py) run the tree without a (T x T) mask. All give the same hidden states (algorithms.md, 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from openrlhf_ebft.core.tree_batch import TreeBatch

AttentionMode = Literal["sdpa", "eager", "rows", "split", "flex"]
MaskKind = Literal["boolean", "additive"]


@dataclass(frozen=True)
class AttentionSpec:
    """What a model's attention layers need.

    `windows` maps the names of the model's attention types to their sliding window in tokens (None: full attention);
    a model whose layers are all alike has the single name "".
    """

    mask_kind: MaskKind
    windows: tuple[tuple[str, int | None], ...] = (("", None),)


def attention_masks(
    allowed: Tensor, position_ids: Tensor, spec: AttentionSpec, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Builds the 4-axis masks that transformers takes as `attention_mask`.

    Args:
        allowed: (b, T, T) bool, query by key.
        position_ids: (b, T) int64; sliding windows are cut by position, since a branch lies far from its context.
        spec: mask kind and windows of the model.
        dtype: dtype of additive masks.

    Returns:
        (b, 1, T, T) mask, or a dict of such masks by attention type.
    """
    distance = position_ids[:, :, None] - position_ids[:, None, :]
    masks = {}
    for name, window in spec.windows:
        mask = allowed if window is None else allowed & (distance < window)
        masks[name] = (mask if spec.mask_kind == "boolean" else _additive(mask, dtype))[:, None]
    return masks[""] if set(masks) == {""} else masks


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


@dataclass(frozen=True, eq=False)
class TreeRows:
    """A tree batch unrolled to causal rows: R rows of at most L tokens, right-padded."""

    input_ids: Tensor  # (R, L) int64
    position_ids: Tensor  # (R, L) int64
    valid: Tensor  # (R, L) bool
    allowed: Tensor | None  # (R, L, L) bool, only when documents are masked: causality alone is not enough then
    source: Tensor  # (b * T,) flat index into (R, L) of the row token that computes each grid token; 0 at padding


def unroll_rows(batch: TreeBatch) -> TreeRows:
    """One row for each reference and one for each branch (its context, then its own tokens)."""
    width, device = batch.input_ids.shape[1], batch.input_ids.device
    rows: list[Tensor] = []
    owners: list[Tensor] = []  # for each row the grid tokens that it computes, aligned with the row's tail
    for tree, start in zip(batch.trees, batch.starts, strict=True):
        reference = torch.arange(tree.num_reference_tokens, device=device) + start
        rows.append(reference)
        owners.append(reference)
        for branch in range(tree.num_branches):
            indices = tree.branch_indices(branch) + start
            rows.append(indices)
            owners.append(indices[indices.numel() - int(tree.branch_lengths.flatten()[branch]) :])
    length = max(row.numel() for row in rows)
    grid = torch.zeros(len(rows), length, dtype=torch.long, device=device)
    valid = torch.zeros(len(rows), length, dtype=torch.bool, device=device)
    source = torch.zeros(len(batch.trees) * width, dtype=torch.long, device=device)
    for number, (row, owner) in enumerate(zip(rows, owners, strict=True)):
        grid[number, : row.numel()] = row
        valid[number, : row.numel()] = True
        columns = torch.arange(row.numel() - owner.numel(), row.numel(), device=device)
        source[owner] = number * length + columns
    allowed = _row_masks(batch, grid, valid) if _has_documents(batch) else None
    flat_ids, flat_positions = batch.input_ids.flatten()[grid], batch.position_ids.flatten()[grid]
    return TreeRows(flat_ids, flat_positions.masked_fill(~valid, 0), valid, allowed, source)


def _has_documents(batch: TreeBatch) -> bool:
    return any(tree.reference.document_ids is not None for tree in batch.trees)


def _row_masks(batch: TreeBatch, grid: Tensor, valid: Tensor) -> Tensor:
    width = batch.input_ids.shape[1]
    owner, columns = grid // width, grid % width
    mask = batch.allowed()[owner[:, :1, None], columns[:, :, None], columns[:, None, :]]
    mask &= valid[:, :, None] & valid[:, None, :]
    return mask | torch.eye(grid.shape[1], dtype=torch.bool, device=grid.device)
