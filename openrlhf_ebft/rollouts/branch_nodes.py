"""Branches that have the same tokens so far share one node, which is computed once.

Samples of an anchor begin alike more often than not: of four samples of code at temperature 0.6 about 1.7 first tokens
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ebft.core.experience import RolloutRequest

_ID_RANGE = 2**32  # above every token id


@dataclass(frozen=True, eq=False)
class BranchNodes:
    """U distinct beginnings of the branches of b requests, request by request, anchor by anchor; all on the CPU."""

    tree: Tensor  # (U,) int64 request
    slot: Tensor  # (U,) int64 place among the request's nodes
    anchor: Tensor  # (U,) int64 anchor of the request's reference
    parent: Tensor  # (U,) int64 slot of the node without the last token
    token: Tensor  # (U,) int64 last token; 0 where there is none yet
    num_trees: int  # b

    @classmethod
    def at_anchors(cls, requests: Sequence[RolloutRequest]) -> BranchNodes:
        """The empty beginnings: one node for each anchor."""
        counts = torch.tensor([len(request.reference.anchors) for request in requests])
        tree = torch.repeat_interleave(torch.arange(len(requests)), counts)
        anchor = torch.cat([request.reference.anchors.cpu() for request in requests])
        nothing = torch.zeros_like(tree)
        return cls(tree, _places(tree), anchor, nothing, nothing, len(requests))

    def extend(self, node: Tensor, tokens: Tensor) -> tuple[BranchNodes, Tensor]:
        """Adds a token to some branches.

        Args:
            node: (N,) int64 node of each branch that goes on.
            tokens: (N,) int64 its next token.

        Returns:
            the nodes of these branches, and (N,) int64 the node of each.
        """
        keys, inverse = torch.unique(node * _ID_RANGE + tokens, return_inverse=True)
        before = keys // _ID_RANGE
        tree = self.tree[before]
        nodes = BranchNodes(
            tree, _places(tree), self.anchor[before], self.slot[before], keys % _ID_RANGE, self.num_trees
        )
        return nodes, inverse

    def grid(self, values: Tensor, fill: int) -> Tensor:
        """(U,) -> (b, R), R the most nodes of a request; `fill` where a request has fewer."""
        size = int(self.slot.max()) + 1
        grid = torch.full((self.num_trees, size), fill, dtype=values.dtype)
        grid[self.tree, self.slot] = values
        return grid


def _places(tree: Tensor) -> Tensor:
    """Place of each entry among those of the same tree; `tree` is in rising order."""
    return torch.arange(len(tree)) - torch.searchsorted(tree, tree)
