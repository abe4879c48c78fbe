"""One optimizer step's worth of trees: counts over the whole batch, and its cut into ranks and micro-batches."""

from __future__ import annotations

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


def micro_batches(items: Sequence[TrainItem], size: int, count: int) -> list[list[TrainItem]]:
    """Cuts a rank's items into `count` micro-batches of at most `size`; the last ones may be empty.

    Every rank must run the same number of passes, or collective operations would wait for ever.
    """
    if len(items) > size * count:
        raise ValueError(f"{len(items)} trees do not fit {count} micro-batches of {size}")
    return [list(items[i * size : (i + 1) * size]) for i in range(count)]


def without_advantages(tree: RolloutTree) -> TrainItem:
    """An item of a supervised step or an evaluation, where completions carry no advantage."""
    return TrainItem(tree, torch.zeros(tree.branch_lengths.shape))
