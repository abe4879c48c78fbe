"""One optimizer step's worth of trees: counts over the whole batch, and its cut into ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ebft.core.losses import GlobalCount
from openrlhf_ebft.core.rollout_tree import RolloutTree


@dataclass(frozen=True, eq=False)
class TrainItem:
    """A tree with the advantage of each of its completions."""

    tree: RolloutTree
    advantages: Tensor  # (A, n) float32
    old_logprobs: Tensor | None = None  # (B,) float32 under the policy at rollout time; None: it is still the same
    reference_logprobs: Tensor | None = None  # (B,) float32 under the reference model of the KL term

    def __post_init__(self) -> None:
        if self.advantages.shape != self.tree.branch_lengths.shape:
            raise ValueError(
                f"{self.tree.example_id}: advantages of shape {tuple(self.advantages.shape)} for completions "
                f"of shape {tuple(self.tree.branch_lengths.shape)}"
            )
        for name, values in (("old", self.old_logprobs), ("reference", self.reference_logprobs)):
            if values is not None and values.shape != self.tree.branch_tokens.shape:
                raise ValueError(
                    f"{self.tree.example_id}: {name} log-probabilities of shape {tuple(values.shape)} for "
                    f"{self.tree.branch_tokens.numel()} tokens"
                )

    @classmethod
    def from_groups(cls, tree: RolloutTree, advantages: Mapping[tuple[str, int], Tensor]) -> TrainItem:
        """Collects the advantages (n,) of the tree's groups, which are named (example id, anchor number)."""
        groups = [advantages[(tree.example_id, anchor)] for anchor in range(tree.num_anchors)]
        return cls(tree, torch.stack(groups))


@dataclass(frozen=True)
class StepCounts:
    """Denominators of the loss terms, over all ranks and micro-batches of the step."""

    completions: GlobalCount
    references: GlobalCount  # tokens that the cross-entropy covers


def count_step(trees: Sequence[RolloutTree]) -> StepCounts:
    """Counts completions (all have a token) and references with a supervised token."""
    supervised = [tree.supervised_tokens.numel() for tree in trees]
    return StepCounts(
        completions=GlobalCount(sum(t.num_branches for t in trees), sum(t.branch_tokens.numel() for t in trees)),
        references=GlobalCount(sum(count > 0 for count in supervised), sum(supervised)),
    )


def split_by_load(loads: Sequence[int], parts: int) -> list[list[int]]:
    """Deals item numbers out to `parts`, heaviest first, always to the lightest part; deterministic.

    Used for trees over trainer ranks and requests over engines. Numbers in each part stay ascending.
    """
    totals = [0] * parts
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        lightest = min(range(parts), key=lambda p: (totals[p], len(dealt[p]), p))
        totals[lightest] += loads[item]
        dealt[lightest].append(item)
    return [sorted(part) for part in dealt]


def deal_passes(
    sizes: Sequence[int], ranks: int, *, micro_batch_size: int, max_tokens: int | None = None
) -> list[list[list[int]]]:
    """Item numbers of every pass of every rank: [rank][pass][item]. Every item is in one pass.

    All ranks get the same number of passes, some of which may be empty: a rank with fewer would leave the others
    waiting in a collective operation.

    Args:
        sizes: tokens of each item, at least one item.
        ranks: trainer ranks.
        micro_batch_size: items of a pass, where `max_tokens` is None.
        max_tokens: padded tokens of a pass (items times the longest); an item above it is a pass of its own.
    """
    if max_tokens is None:
        parts = split_by_load(sizes, ranks)
        count = max(math.ceil(len(part) / micro_batch_size) for part in parts)
        starts = range(0, count * micro_batch_size, micro_batch_size)
        return [[part[start : start + micro_batch_size] for start in starts] for part in parts]
    passes = _fill_passes(sizes, max_tokens)
    count = math.ceil(len(passes) / ranks)
    _split_heaviest(passes, sizes, count * ranks)
    loads = [_padded(items, sizes) for items in passes]
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for number in sorted(range(len(passes)), key=lambda i: (-loads[i], i)):
        open_ranks = [rank for rank in range(ranks) if len(dealt[rank]) < count]
        lightest = min(open_ranks, key=lambda rank: (totals[rank], len(dealt[rank]), rank))
        totals[lightest] += loads[number]
        dealt[lightest].append(sorted(passes[number]))
    return [own + [[]] * (count - len(own)) for own in dealt]


def _padded(items: Sequence[int], sizes: Sequence[int]) -> int:
    """Tokens of a pass, padding included."""
    return len(items) * max(sizes[item] for item in items)


def _fill_passes(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Items longest first, so that those of a pass are alike and little is padding; as many a pass as fit."""
    passes: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if passes and _padded([*passes[-1], item], sizes) <= max_tokens:
            passes[-1].append(item)
        else:
            passes.append([item])
    return passes


def _split_heaviest(passes: list[list[int]], sizes: Sequence[int], wanted: int) -> None:
    """Cuts passes in two, heaviest first, until there are `wanted` or none holds two items."""
    while len(passes) < wanted and any(len(items) > 1 for items in passes):
        items = max((items for items in passes if len(items) > 1), key=lambda items: _padded(items, sizes))
        cut = min(range(1, len(items)), key=lambda i: max(_padded(items[:i], sizes), _padded(items[i:], sizes)))
        passes[passes.index(items)] = items[:cut]
        passes.append(items[cut:])


def without_advantages(tree: RolloutTree) -> TrainItem:
    """An item of a supervised step or an evaluation, where completions carry no advantage."""
    return TrainItem(tree, torch.zeros(tree.branch_lengths.shape))
