"""Tree attention for flex kernels: the mask as a function of two places in the grid, and its blocks.

Shape letters: b trees, T tokens of a padded tree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from openrlhf_ebft.core.attention import AttentionSpec
from openrlhf_ebft.core.tree_batch import TreeBatch

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tree, head, query column, key column) -> bool: may the query attend to the key?"""


def tree_mask_mod(batch: TreeBatch, window: int | None = None) -> MaskMod:
    """The mask of `TreeBatch.allowed`, read from four numbers of each token instead of a (T x T) tensor.

    Args:
        batch: trees, padded on either side; a padding token sees only itself.
        window: sliding window in tokens, cut by position; None: full attention.
    """
    limits, branches, documents = _grids(batch)
    positions = batch.position_ids

    def allowed(tree: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = branches[tree, query], branches[tree, key]
        seen = ((other == -1) & (key < limits[tree, query])) | ((own == other) & (key <= query))
        seen = seen & (documents[tree, query] == documents[tree, key])
        if window is not None:
            seen = seen & (positions[tree, query] - positions[tree, key] < window)
        return seen

    return allowed


def tree_block_masks(batch: TreeBatch, spec: AttentionSpec) -> BlockMask | dict[str, BlockMask]:
    """Block masks that transformers' flex attention takes as `attention_mask`.

    Only blocks that hold an allowed pair are computed. Building them evaluates every pair once, in b * T * T bytes that
    are freed before the model runs.

    Returns:
        one mask for models whose layers are all alike, else a dict of them by attention type.
    """
    trees, width = batch.input_ids.shape
    device = batch.input_ids.device
    masks = {
        name: create_block_mask(tree_mask_mod(batch, window), trees, None, width, width, device=device)
        for name, window in spec.windows
    }
    return masks[""] if set(masks) == {""} else masks


def _grids(batch: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(b, T) int64 each: column where the visible reference ends, branch, document.

    A padding token is a branch of its own (-2 and below), so that it sees itself and no one else does.
    """
    trees, width = batch.input_ids.shape
    device = batch.input_ids.device
    limits = torch.zeros(trees, width, dtype=torch.int64, device=device)
    branches = (-2 - torch.arange(width, device=device)).repeat(trees, 1)
    documents = torch.zeros_like(limits)
    for row, tree in enumerate(batch.trees):
        offset = int(batch.starts[row]) - row * width
        columns = slice(offset, offset + len(tree))
        limits[row, columns] = tree.reference_limits + offset
        branches[row, columns] = tree.branch_numbers
        documents[row, columns] = tree.document_of_token
    return limits, branches, documents
