"""The frozen reference model of the KL term: log-probabilities of completions from one pass over their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.tree_batch import TreeBatch, batches_by_tokens
from openrlhf_ebft.models.policy import PolicyModel


class ReferenceModel:
    """Scores completions as the policy does: same trees, same temperature, no gradient."""

    def __init__(self, model: PolicyModel, max_tokens_per_batch: int) -> None:
        """
        Args:
            model: on its device; it is set to evaluation and its parameters are frozen.
            max_tokens_per_batch: padded tokens of one forward pass; a longer tree is a pass of its own.
        """
        self.model = model.eval().requires_grad_(False)
        self._limit = max_tokens_per_batch

    @torch.no_grad()
    def logprobs(self, trees: Sequence[RolloutTree]) -> list[Tensor]:
        """Log-probabilities (B,) of each tree's completions, float32 on the CPU, in nats.

        Raises ValueError naming the example for which one is not finite.
        """
        device = self.model.model.device
        results: list[Tensor] = []
        for numbers in batches_by_tokens([len(tree) for tree in trees], self._limit):
            chosen = [_completions_only(trees[number]) for number in numbers]
            values = self.model(TreeBatch.collate(chosen).to(device)).branch.cpu()
            results += values.split([tree.branch_tokens.numel() for tree in chosen])
        for tree, values in zip(trees, results, strict=True):
            if not bool(values.isfinite().all()):
                raise ValueError(f"{tree.example_id}: the reference model's log-probabilities are not finite")
        return results


def _completions_only(tree: RolloutTree) -> RolloutTree:
    """The tree without supervised tokens, which the reference model is not asked for."""
    nothing = torch.zeros_like(tree.reference.loss_mask)
    return replace(tree, reference=replace(tree.reference, loss_mask=nothing))
