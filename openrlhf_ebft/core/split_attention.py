"""Attention of rollout trees without a (T x T) mask: reference keys are shared, own keys belong to one branch.

A branch token attends to the reference before its anchor and to its own branch; both parts go through one softmax
(the same numbers as running every branch alone).

Shape letters: b trees, S reference tokens, R branches, L query tokens of a branch, K key tokens of a branch,
M = R * L queries, H heads, V key/value heads, d head size, T tokens of a padded tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.tree_batch import TreeBatch

# Tokens are computed once for all samples that agree where at most this share of them is left; gathers have a price.
_WORTHWHILE = 0.95


@dataclass(frozen=True, eq=False)
class BranchPlaces:
    """Which reference tokens a branch token may see, and where it stands: b references with R branches each."""

    anchors: Tensor  # (b, R) int64; 1 where a tree has fewer branches than R
    reference_lengths: Tensor  # (b,) int64, the rest of S is padding on the right
    documents: Tensor | None  # (b, S) int64, or None when no reference holds several documents
    positions: Tensor  # (b, S + 1) int64 position ids; entry S_i continues the numbering of the last token

    @classmethod
    def collate(cls, references: Sequence[Reference], num_samples: Sequence[int]) -> BranchPlaces:
        """Places of `num_samples` branches at every anchor of each reference, anchor by anchor, padded."""
        device = references[0].token_ids.device
        trees = [RolloutTree.without_branches(reference) for reference in references]
        size = max(len(tree) for tree in trees)
        counts = [tree.num_anchors * samples for tree, samples in zip(trees, num_samples, strict=True)]
        anchors = torch.ones(len(trees), max(counts), dtype=torch.int64, device=device)
        documents = torch.zeros(len(trees), size, dtype=torch.int64, device=device)
        positions = torch.zeros(len(trees), size + 1, dtype=torch.int64, device=device)
        for row, tree in enumerate(trees):
            length = len(tree)
            anchors[row, : counts[row]] = tree.reference.anchors.repeat_interleave(num_samples[row])
            documents[row, :length] = tree.document_of_token
            positions[row, :length] = tree.position_ids
            positions[row, length] = positions[row, length - 1] + 1
        masked = any(reference.document_ids is not None for reference in references)
        lengths = torch.tensor([len(tree) for tree in trees], device=device)
        return cls(anchors, lengths, documents if masked else None, positions)

    def query_positions(self, steps: Tensor) -> Tensor:
        """Position ids (b, R, L) of the branch tokens with the places `steps` (L,) in their branches."""
        return self.positions.gather(1, self.anchors)[..., None] + steps

    def allowed(self, steps: Tensor, num_keys: int, window: int | None) -> tuple[Tensor, Tensor | None]:
        """What the branch tokens `steps` (L,) may attend to.

        Args:
            steps: places in the branch, on the device of the other tensors.
            num_keys: K, tokens of a branch that have keys.
            window: sliding window in tokens, cut by position; None: full attention.

        Returns:
            (b, R, L or 1, S) bool for reference keys; (b or 1, R or 1, L, K) bool for the branch's own keys.
        """
        keys = torch.arange(num_keys, device=steps.device)
        index = torch.arange(self.positions.shape[1] - 1, device=steps.device)
        reference = (index < self.anchors[..., None])[:, :, None]  # (b, R, 1, S)
        own = (keys <= steps[:, None])[None, None]  # (1, 1, L, K)
        if self.documents is not None:
            query, key = self._document(steps), self._document(keys)
            reference = reference & (query[..., None] == self.documents[:, None, None])
            own = own & (query[..., None] == key[:, :, None])
        if window is not None:
            positions = self.query_positions(steps)[..., None]
            reference = reference & (positions - self.positions[:, None, None, :-1] < window)
            own = own & (steps[:, None] - keys < window)
        return reference, own

    def _document(self, steps: Tensor) -> Tensor:
        """(b, R, L) document that each branch token stands for: that of reference token a + g."""
        assert self.documents is not None
        stands_for = self.anchors[..., None] + steps
        stands_for = torch.minimum(stands_for, self.reference_lengths[:, None, None] - 1)
        return self.documents.gather(1, stands_for.flatten(1)).view_as(stands_for)

    def reference_allowed(self, window: int | None) -> Tensor | None:
        """(b, 1, S, S) bool among reference tokens; None where causality alone is right."""
        if self.documents is None and window is None:
            return None
        positions = self.positions[:, :-1]
        size = positions.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=positions.device).tril()[None]
        if self.documents is not None:
            mask = mask & (self.documents[:, :, None] == self.documents[:, None, :])
        if window is not None:
            mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
        # Padding must see something, or its softmax would be empty.
        return (mask | torch.eye(size, dtype=torch.bool, device=positions.device))[:, None]


@dataclass(frozen=True, eq=False)
class DistinctTokens:
    """The tokens of a tree batch that have to be computed: of samples that agree so far only the first one's.

    b trees of T tokens, at most U of a tree distinct.
    """

    sources: Tensor  # (b, U) int64 column of each distinct token in the batch; 0 at padding
    places: Tensor  # (b, T) int64 place of each token among the distinct ones

    @classmethod
    def of(cls, batch: TreeBatch) -> DistinctTokens | None:
        """None where hardly anything would be saved."""
        trees, width = batch.input_ids.shape
        device = batch.input_ids.device
        first = batch.first_alike.view(trees, width) - torch.arange(trees, device=device)[:, None] * width
        distinct = batch.valid & (first == torch.arange(width, device=device))
        counts = distinct.sum(1)
        size = int(counts.max())
        if size > width * _WORTHWHILE:
            return None
        places = (distinct.long().cumsum(1) - 1).clamp(min=0).gather(1, first)
        sources = torch.zeros(trees, size, dtype=torch.int64, device=device)
        row, column = torch.nonzero(distinct, as_tuple=True)
        sources[row, places[row, column]] = column
        return cls(sources, places)

    def spread(self, states: Tensor) -> Tensor:
        """(b, U, D) states of the distinct tokens -> (b, T, D) of all; padding holds arbitrary values."""
        return take_columns(states, self.places)


@dataclass(frozen=True, eq=False)
class TreeSplit:
    """A tree batch seen as references and branches: index tensors into the (b, T) grid that is computed, and masks.

    That grid is the batch's own, or its distinct tokens.
    """

    places: BranchPlaces
    reference: Tensor  # (b, S) int64 columns of reference tokens, 0 at padding
    branch: Tensor  # (b, R * L) int64 columns of branch tokens, branch by branch, 0 at padding
    inverse: Tensor  # (b, T) int64: where each column lies in [references, branches]; 0 at padding
    num_steps: int  # L
    is_plain: bool  # the grid is [references, branches] already: slices instead of gathers

    @classmethod
    def from_batch(cls, batch: TreeBatch, distinct: DistinctTokens | None = None) -> TreeSplit:
        """Index tensors of a batch, on its device."""
        width, device = batch.input_ids.shape[1], batch.input_ids.device
        trees = batch.trees
        size = max(tree.num_reference_tokens for tree in trees)
        branches = max(tree.num_branches for tree in trees)
        steps = max([int(tree.branch_lengths.max()) for tree in trees if tree.num_branches] or [0])
        reference = torch.zeros(len(trees), size, dtype=torch.int64, device=device)
        branch = torch.zeros(len(trees), branches, steps, dtype=torch.int64, device=device)
        inverse = torch.zeros(len(trees), width, dtype=torch.int64, device=device)
        for row, tree in enumerate(trees):
            offset = int(batch.starts[row]) - row * width
            own = torch.arange(len(tree), device=device) + offset
            count = tree.num_reference_tokens
            reference[row, :count] = own[:count]
            branch[row, tree.branch_of_token, tree.step_of_token] = own[count:]
            inverse[row, own[:count]] = own[:count] - offset
            inverse[row, own[count:]] = size + tree.branch_of_token * steps + tree.step_of_token
        flat = branch.flatten(1)
        places = BranchPlaces.collate([tree.reference for tree in trees], [tree.num_samples for tree in trees])
        if distinct is not None:
            reference, flat = (distinct.places.gather(1, columns) for columns in (reference, flat))
            return cls(places, reference, flat, inverse.gather(1, distinct.sources), steps, is_plain=False)
        order = torch.arange(width, device=device)
        is_plain = width == size + flat.shape[1] and bool((torch.cat([reference, flat], 1) == order).all())
        return cls(places, reference, flat, inverse, steps, is_plain)

    def divide(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(b, heads, T, d) -> reference tokens (b, heads, S, d) and branch tokens (b, heads, M, d)."""
        if self.is_plain:
            count = self.reference.shape[1]
            return states[:, :, :count], states[:, :, count:]
        return _take_heads(states, self.reference), _take_heads(states, self.branch)

    def join(self, reference: Tensor, branch: Tensor) -> Tensor:
        """The inverse of `divide`."""
        whole = torch.cat([reference, branch], dim=2)
        return whole if self.is_plain else _take_heads(whole, self.inverse)


def _take_heads(states: Tensor, columns: Tensor) -> Tensor:
    """(b, heads, T, d) at columns (b, N) -> (b, heads, N, d)."""
    return take_columns(states.transpose(1, 2).flatten(2), columns).unflatten(2, (states.shape[1], -1)).transpose(1, 2)


def take_columns(states: Tensor, columns: Tensor) -> Tensor:
    """(b, T, ...) at columns (b, N) int64 -> (b, N, ...)."""
    rows = torch.arange(len(states), device=states.device)[:, None]
    if states.device.type != "cpu":
        return states[rows, columns]
    # On CPUs several times as fast in both directions; elsewhere its sums would have no fixed order.
    flat = (rows * states.shape[1] + columns).flatten()
    return states.flatten(0, 1).index_select(0, flat).unflatten(0, columns.shape)
