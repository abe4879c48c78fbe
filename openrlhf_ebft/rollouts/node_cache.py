"""Keys and values of the tokens that branch nodes have, each held once however many nodes go on from it.

Shape letters: b references, R nodes of a reference, K tokens of a branch so far, V key/value heads, d head size,
U nodes of all steps so far.
"""

from __future__ import annotations

import torch
from torch import Tensor


class NodeCache:
    """Grows by the newest tokens of all nodes at every step; nothing that is held moves."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: (b, V, U, d)
        self._size = 0  # U
        self._columns: Tensor | None = None  # (b, R, K) int64 places of each node's tokens among the U
        self._rows: dict[int, Tensor] = {}  # by V: the same as rows of (b * V * U, d)

    def next_step(self, parents: Tensor) -> None:
        """Moves on by a token; parents (b, R) int64: the node of the last step that each node goes on from."""
        newest = self._size + torch.arange(parents.shape[1], device=parents.device)
        newest = newest.expand_as(parents)[..., None]
        if self._columns is None:
            self._columns = newest
        else:
            before = self._columns.gather(1, parents[..., None].expand(-1, -1, self._columns.shape[2]))
            self._columns = torch.cat([before, newest], dim=2)
        self._size += parents.shape[1]
        self._rows.clear()

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of the newest tokens (b, V, R, d); returns those of each node's tokens (b, V, R, K, d)."""
        new = key, value
        if layer in self._held:
            new = tuple(torch.cat(parts, dim=2) for parts in zip(self._held[layer], new, strict=True))
        self._held[layer] = new
        return self._take(new[0]), self._take(new[1])

    def _take(self, held: Tensor) -> Tensor:
        assert self._columns is not None
        trees, kv_heads = held.shape[:2]
        if kv_heads not in self._rows:
            starts = torch.arange(trees * kv_heads, device=held.device).view(trees, kv_heads, 1, 1) * self._size
            self._rows[kv_heads] = (starts + self._columns[:, None]).flatten()
        shape = trees, kv_heads, *self._columns.shape[1:], held.shape[3]
        return held.flatten(0, 2).index_select(0, self._rows[kv_heads]).view(shape)
