"""How the attention of branches is cut into blocks, and how its operands are laid out for batched matrix products.

Shape letters as in `branch_attention`, and W keys of a row: K own ones, S of the reference, and padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

_ALIGNED = 32  # keys of a block are a multiple of this: the softmax of odd sizes takes up to twice as long
PADDING = _ALIGNED - 1
"""The most keys behind those of the reference that a block may have, which nobody sees."""


@dataclass(frozen=True, eq=False)
class Block:
    """Branches whose scores exist at one time: some of one tree, or those of several whole trees."""

    trees: slice
    branches: slice
    reach: int  # reference keys that enter: those that some branch of the block sees, rounded up
    open: int  # reference keys that all of the block see, from the first one on
    place: tuple[slice, slice]  # its queries in (b * V, M, x)
    grid: tuple[int, int, int, int, int, int]  # of its scores: (t, V, n, g, L, K + reach)

    @property
    def keys(self) -> int:
        """K + reach."""
        return self.grid[5]

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """`grid` as batches of matrices: (t * V, n * g * L, K + reach)."""
        trees, kv_heads, branches, shared, steps, keys = self.grid
        return trees * kv_heads, branches * shared * steps, keys

    @cached_property
    def num_scores(self) -> int:
        """Product of `grid`."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call. Queries lie as (b * V, M, d): seen from the own keys (b * V * R, g * L, d), without a copy."""

    trees: int  # b
    kv_heads: int  # V
    branches: int  # R
    shared: int  # g
    steps: int  # L
    own: int  # K
    reference: int  # S

    @classmethod
    def of(cls, query: Tensor, key: Tensor, own_key: Tensor) -> Sizes:
        """query (b, V, R, g, L, d), key (b, V, S, d), own_key (b, V, R, K, d)."""
        trees, kv_heads, branches, shared, steps, _ = query.shape
        return cls(trees, kv_heads, branches, shared, steps, own_key.shape[3], key.shape[2])

    def cut(self, reach: list[list[int]], open_keys: list[list[int]], limit: int) -> Iterator[Block]:
        """Blocks of at most `limit` scores, or of one branch; `reach` and `open_keys` are those of `BranchBias`."""
        of_branch = max(self.kv_heads * self.shared * self.steps * (self.reference + self.own), 1)
        at_once = max(1, limit // of_branch)
        num_trees = max(1, at_once // max(self.branches, 1))
        num_branches = -(-self.branches // -(-self.branches // at_once)) if self.branches else 1  # about equal parts
        for tree in range(0, self.trees, num_trees):
            for branch in range(0, self.branches, num_branches):
                trees = slice(tree, min(tree + num_trees, self.trees))
                branches = slice(branch, min(branch + num_branches, self.branches))
                of_trees = trees if len(reach) > 1 else slice(None)
                seen = max(max(of_tree[branches]) for of_tree in reach[of_trees]) + self.own
                keys = _aligned(seen)
                yield Block(
                    trees,
                    branches,
                    keys - self.own,
                    min(min(of_tree[branches]) for of_tree in open_keys[of_trees]),
                    (_times(trees, self.kv_heads), _times(branches, self.shared * self.steps)),
                    (_length(trees), self.kv_heads, _length(branches), self.shared, self.steps, keys),
                )

    def rows(self, states: Tensor) -> Tensor:
        """(b, V, R, g, L, d) -> (b * V, M, d), contiguous: every product would copy it."""
        return states.flatten(2, 4).flatten(0, 1).contiguous()

    def token_by_token(self, rows: Tensor, factor: float = 1.0) -> Tensor:
        """(b * V, M, d) times a factor -> (b, V, R, g, L, d), laid out as (b, R, L, V, g, d).

        A layer reads the heads of a token together.
        """
        trees, kv_heads, branches, shared, steps = self.trees, self.kv_heads, self.branches, self.shared, self.steps
        room = rows.new_empty(trees, branches, steps, kv_heads, shared, rows.shape[2]).permute(0, 3, 1, 4, 2, 5)
        given = rows.view(room.shape)
        return room.copy_(given) if factor == 1.0 else torch.mul(given, factor, out=room)

    def by_branch(self, rows: Tensor) -> Tensor:
        """(b * V, M, x) -> (b * V * R, g * L, x)."""
        return rows.view(self.trees * self.kv_heads * self.branches, self.shared * self.steps, rows.shape[2])

    def own_products(self, rows: Tensor, own: Tensor) -> Tensor:
        """Rows (b * V, M, d) times own keys or values (b, V, R, K, d): (b * V, M, K)."""
        return torch.bmm(self.by_branch(rows), own.flatten(0, 2).mT).view(*rows.shape[:2], self.own)

    def own_mixtures(self, weights: Tensor, own: Tensor) -> Tensor:
        """Weights (b * V, M, K) times own keys or values (b, V, R, K, d): (b * V, M, d)."""
        return torch.bmm(self.by_branch(weights), own.flatten(0, 2)).view(*weights.shape[:2], own.shape[4])

    def on_own(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Gradient of own keys or values (b, V, R, K, d) from weights (b * V, M, K) and rows (b * V, M, d)."""
        shape = self.trees, self.kv_heads, self.branches, self.own, rows.shape[2]
        return torch.bmm(self.by_branch(weights).mT, self.by_branch(rows)).view(shape)

    def behind_own(self, states: Tensor) -> Tensor:
        """(b, V, S, d) -> (b * V, W, d), zeros elsewhere: a product with scores of all keys leaves own ones out."""
        width = self.own + self.reference
        return nn.functional.pad(states, (0, 0, self.own, _aligned(width) - width)).flatten(0, 1)

    def of_reference(self, states: Tensor) -> Tensor:
        """The inverse of `behind_own`."""
        return states[:, self.own : self.own + self.reference].unflatten(0, (self.trees, self.kv_heads))

    def products(self, block: Block, rows: Tensor, keys: Tensor, space: Tensor) -> Tensor:
        """Rows (b * V, M, d) of the block times its keys (b * V, W, d): `block.shape`, written into `space`."""
        products = space[: block.num_scores].view(block.shape)
        return torch.bmm(_part(rows, block), _keys(keys, block).mT, out=products)

    def mixtures(self, block: Block, weights: Tensor, values: Tensor) -> Tensor:
        """Weights (`block.shape`) times the block's values of (b * V, W, d): its part of (b * V, M, d)."""
        return torch.bmm(weights, _keys(values, block))

    def add_on_keys(self, total: Tensor, block: Block, rows: Tensor, weights: Tensor) -> None:
        """Adds rows (b * V, M, d), transposed, times weights (`block.shape`) to its part of `total` (b * V, d, W)."""
        total[block.place[0], :, : block.keys] += torch.bmm(_part(rows, block).mT, weights)


def _aligned(keys: int) -> int:
    return -(-keys // _ALIGNED) * _ALIGNED


def _length(part: slice) -> int:
    return part.stop - part.start


def _times(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)


def _part(rows: Tensor, block: Block) -> Tensor:
    return rows[block.place].contiguous()


def _keys(states: Tensor, block: Block) -> Tensor:
    return states[block.place[0], : block.keys].contiguous()
