"""Builds references, rollouts and trees of random tokens for tests."""

from __future__ import annotations

import torch

from openrlhf_ebft.core.anchors import StrideSettings, answer_anchors
from openrlhf_ebft.core.experience import Completion, Reference, Rollout
from openrlhf_ebft.core.rollout_tree import RolloutTree


def make_reference(
    size: int, anchors: list[int], *, window: int | None = None, vocab: int = 64, seed: int = 0, documents=None
) -> Reference:
    """A reference of random tokens; each window reaches to the end unless `window` says otherwise."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor(anchors)
    lengths = torch.full_like(positions, window) if window is not None else size - positions
    loss_mask = torch.arange(size) >= anchors[0]
    return Reference(
        example_id=f"example-{seed}",
        token_ids=torch.randint(3, vocab, (size,), generator=generator),
        anchors=positions,
        window_lengths=lengths,
        max_new_tokens=lengths.clamp(min=1),
        loss_mask=loss_mask,
        document_ids=None if documents is None else torch.tensor(documents),
    )


def document_anchors(size: int, settings: StrideSettings, *, prompt: int = 0) -> torch.Tensor:
    """Anchors of a document of `size` tokens of which the first `prompt` are not trained on."""
    return answer_anchors(torch.arange(size) >= prompt, None, settings)


def make_tree(reference: Reference, lengths: list[list[int]], *, vocab: int = 64, seed: int = 1) -> RolloutTree:
    """A tree with completions of the given lengths [A][n]."""
    generator = torch.Generator().manual_seed(seed)

    def completion(length: int) -> Completion:
        tokens = torch.randint(3, vocab, (length,), generator=generator)
        logprobs = -torch.rand(length, generator=generator)
        return Completion(tuple(tokens.tolist()), tuple(logprobs.tolist()), "length")

    groups = tuple(tuple(completion(length) for length in group) for group in lengths)
    return RolloutTree.from_rollout(reference, Rollout(reference.example_id, groups, weight_version=0))
