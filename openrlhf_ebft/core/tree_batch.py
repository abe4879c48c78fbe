"""Several rollout trees side by side, padded to one length, with flat index tensors into the (batch, T) grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from openrlhf_ebft.core.rollout_tree import RolloutTree

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """b trees padded to T tokens. Flat indices count the (b, T) grid row by row."""

    trees: tuple[RolloutTree, ...]
    input_ids: Tensor  # (b, T) int64
    position_ids: Tensor  # (b, T) int64, 0 at padding
    valid: Tensor  # (b, T) bool, False at padding
    starts: Tensor  # (b,) int64 flat index of each tree's first token
    padding_side: PaddingSide = "right"

    @classmethod
    def collate(
        cls, trees: Sequence[RolloutTree], pad_token_id: int = 0, padding_side: PaddingSide = "right"
    ) -> TreeBatch:
        """Pads the trees to the longest one. Raises ValueError for an empty list."""
        if not trees:
            raise ValueError("a tree batch needs at least one tree")
        width = max(len(tree) for tree in trees)
        shape = (len(trees), width)
        device = trees[0].device
        input_ids = torch.full(shape, pad_token_id, dtype=torch.long, device=device)
        position_ids = torch.zeros(shape, dtype=torch.long, device=device)
        valid = torch.zeros(shape, dtype=torch.bool, device=device)
        starts = torch.arange(len(trees), device=device) * width
        for row, tree in enumerate(trees):
            offset = width - len(tree) if padding_side == "left" else 0
            columns = slice(offset, offset + len(tree))
            input_ids[row, columns] = tree.token_ids
            position_ids[row, columns] = tree.position_ids
            valid[row, columns] = True
            starts[row] += offset
        return cls(tuple(trees), input_ids, position_ids, valid, starts, padding_side)

    def to(self, device: torch.device) -> TreeBatch:
        """The same batch with all tensors on `device`."""
        trees = tuple(tree.to(device) for tree in self.trees)
        input_ids, position_ids, valid, starts = (
            tensor.to(device) for tensor in (self.input_ids, self.position_ids, self.valid, self.starts)
        )
        return TreeBatch(trees, input_ids, position_ids, valid, starts, self.padding_side)

    def without_last_tokens(self) -> TreeBatch:
        """The batch without each branch's last token, which predicts nothing."""
        trees = [tree.without_last_tokens() for tree in self.trees]
        return TreeBatch.collate(trees, padding_side=self.padding_side)

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.valid.sum())

    def allowed(self) -> Tensor:
        """(b, T, T) bool attention mask. A padding token sees only itself, so that no softmax row is empty."""
        width = self.input_ids.shape[1]
        if len(self.trees) == 1:
            return self.trees[0].allowed()[None]
        mask = torch.zeros(len(self.trees), width, width, dtype=torch.bool, device=self.valid.device)
        mask.diagonal(dim1=1, dim2=2).copy_(~self.valid)
        for row, tree in enumerate(self.trees):
            offset = int(self.starts[row]) - row * width
            mask[row, offset : offset + len(tree), offset : offset + len(tree)] = tree.allowed()
        return mask

    @cached_property
    def branch_tokens(self) -> Tensor:
        """(B,) token ids of all branches, tree by tree in tree layout."""
        return torch.cat([tree.branch_tokens for tree in self.trees])

    def pruned_predictors(self, pruned: TreeBatch) -> Tensor:
        """(B,) flat index into the grid of `pruned`, this batch `without_last_tokens`, that predicts each token."""
        pairs = zip(self.trees, pruned.starts, strict=True)
        return torch.cat([tree.pruned_predictors + start for tree, start in pairs])

    @cached_property
    def first_alike(self) -> Tensor:
        """(b * T,) flat index of the first token that is computed alike; padding tokens are their own."""
        first = torch.arange(self.valid.numel(), device=self.valid.device)
        for tree, start in zip(self.trees, self.starts.tolist(), strict=True):
            first[start : start + len(tree)] = tree.first_alike + start
        return first

    @cached_property
    def branch_of_token(self) -> Tensor:
        """(B,) branch number of each branch token, counted through the whole batch."""
        return self._numbered([tree.branch_of_token for tree in self.trees], [t.num_branches for t in self.trees])

    @cached_property
    def supervised_targets(self) -> Tensor:
        """(R,) token ids that the cross-entropy covers."""
        return torch.cat([tree.reference.token_ids[tree.supervised_tokens] for tree in self.trees])

    @cached_property
    def supervised_predictors(self) -> Tensor:
        """(R,) flat index of the reference token before each supervised token."""
        pairs = zip(self.trees, self.starts, strict=True)
        return torch.cat([tree.supervised_tokens - 1 + start for tree, start in pairs])

    @cached_property
    def tree_of_supervised(self) -> Tensor:
        """(R,) number of the tree that each supervised token belongs to."""
        device = self.valid.device
        counts = torch.tensor([tree.supervised_tokens.numel() for tree in self.trees], device=device)
        return torch.repeat_interleave(torch.arange(len(self.trees), device=device), counts)

    @cached_property
    def sampler_logprobs(self) -> Tensor:
        """(B,) float32 log-probabilities under the sampler."""
        return torch.cat([tree.sampler_logprobs for tree in self.trees])

    @property
    def num_branches(self) -> int:
        return sum(tree.num_branches for tree in self.trees)

    def spread(self, per_branch: Sequence[Tensor]) -> Tensor:
        """Gives every branch token its branch's number: one (A, n) tensor a tree -> (B,)."""
        for tree, values in zip(self.trees, per_branch, strict=True):
            if values.shape != tree.branch_lengths.shape:
                raise ValueError(
                    f"{tree.example_id}: values of shape {tuple(values.shape)} for branches "
                    f"of shape {tuple(tree.branch_lengths.shape)}"
                )
        return torch.cat([values.flatten() for values in per_branch])[self.branch_of_token]

    @staticmethod
    def _numbered(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        offsets = itertools.accumulate(counts, initial=0)
        return torch.cat([part + offset for part, offset in zip(parts, offsets, strict=False)])


def batches_by_tokens(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Consecutive numbers whose padded size (count times longest) stays within `limit`; at least one a batch."""
    batch: list[int] = []
    longest = 0
    for number, length in enumerate(lengths):
        if batch and max(longest, length) * (len(batch) + 1) > limit:
            yield batch
            batch, longest = [], 0
        batch.append(number)
        longest = max(longest, length)
    if batch:
        yield batch
