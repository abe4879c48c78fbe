"""The rows of every group as indices into a rollout tree: what pooling works on.

Shape letters: A anchors, n completions of an anchor, L tokens of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ebft.core.rollout_tree import RolloutTree


@dataclass(frozen=True, eq=False)
class GroupGrid:
    """Rows of every group, right-padded to L tokens: n completions, the ground truth last."""

    indices: Tensor  # (A, n+1, L) int64 tree indices, 0 at padding
    completion: Tensor  # (A, n+1, L) bool: tokens of the completion or of the ground-truth window
    valid: Tensor  # (A, n+1, L) bool: those and, where asked for, the tokens of the context

    @classmethod
    def of(cls, tree: RolloutTree, *, with_context: bool) -> GroupGrid:
        """Where the tokens of every group lie: its completions, then its ground-truth window.

        With `with_context` each row begins with the tokens before the anchor, as an ordinary causal sequence.
        """
        anchors, windows = tree.reference.anchors, tree.reference.window_lengths
        own = torch.cat([tree.branch_lengths, windows[:, None]], dim=1)  # (A, n+1)
        context = anchors[:, None] if with_context else torch.zeros_like(anchors)[:, None]
        column = torch.arange(int((own + context).max()), device=tree.device)  # (L,)
        step = column - context[..., None]  # (A, 1, L), negative in the context
        starts = tree.num_reference_tokens + tree.branch_starts.view_as(tree.branch_lengths)
        first = torch.cat([starts, anchors[:, None]], dim=1)  # (A, n+1) tree index of each row's first own token
        completion = (step >= 0) & (step < own[..., None])  # (A, n+1, L)
        valid, indices = completion | (step < 0), torch.where(step < 0, column, first[..., None] + step)
        return cls(indices.where(valid, 0), completion, valid)
