"""From rollout requests to the prompts that an engine samples, one per anchor, and back to rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from openrlhf_ebft.core.experience import Completion, Reference, Rollout, RolloutRequest
from openrlhf_ebft.core.seeding import completion_seed


@dataclass(frozen=True)
class AnchorPrompt:
    """What is sampled at one anchor: `num_samples` completions of `token_ids`; sample s draws from seed + s."""

    example_id: str
    anchor: int  # index into the reference's anchors
    token_ids: list[int]  # (p,), p >= 1
    max_new_tokens: int
    num_samples: int
    seed: int

    def __str__(self) -> str:
        return f"example {self.example_id!r}, anchor {self.anchor}"


def anchor_prompts(requests: Sequence[RolloutRequest], *, max_model_len: int, vocab_size: int) -> list[AnchorPrompt]:
    """Lists the prompts of all anchors of all requests, in order, each checked against the engine's limits.

    Raises:
        ValueError: names the example and anchor of the first prompt that is empty, holds a token id outside the
            vocabulary, or does not fit `max_model_len` together with its completion.
    """
    prompts = []
    for request in requests:
        reference = request.reference
        if request.num_samples < 1:
            raise ValueError(f"example {reference.example_id!r}: num_samples must be at least 1, got 0 or less")
        tokens = reference.token_ids.tolist()
        limits = reference.max_new_tokens.tolist()
        starts = _context_starts(reference)
        for index, position in enumerate(reference.anchors.tolist()):
            prompt = AnchorPrompt(
                example_id=reference.example_id,
                anchor=index,
                token_ids=tokens[starts[index] : position],
                max_new_tokens=limits[index],
                num_samples=request.num_samples,
                seed=completion_seed(request.seed, index, 0),
            )
            _check(prompt, max_model_len, vocab_size)
            prompts.append(prompt)
    return prompts


def _context_starts(reference: Reference) -> list[int]:
    """First context token of every anchor: the beginning of the document that its completions continue.

    Raises:
        ValueError: completions would run from one document into the next, whose tokens see another context.
    """
    documents = reference.document_ids
    if documents is None:
        return [0] * reference.anchors.numel()
    last = (reference.anchors + reference.max_new_tokens - 1).clamp(max=documents.numel() - 1)
    crossing = documents[last] != documents[reference.anchors - 1]
    if bool(crossing.any()):
        index = int(torch.nonzero(crossing)[0])
        raise ValueError(
            f"example {reference.example_id!r}, anchor {index} at token {int(reference.anchors[index])}: completions "
            f"of up to {int(reference.max_new_tokens[index])} tokens reach into another document, where their context "
            "changes; place anchors so that completions stay inside their document"
        )
    return torch.searchsorted(documents, documents[reference.anchors - 1]).tolist()


def check_token_ids(token_ids: Sequence[int], vocab_size: int, owner: str) -> None:
    """Engines index an embedding with these ids, and say nothing useful (or nothing at all) when one is outside.

    Raises:
        ValueError: an id is negative or not below `vocab_size`; names `owner`, the position and the id.
    """
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{owner}: token id {token} at position {position} is outside the model's vocabulary of {vocab_size}"
            )


def _check(prompt: AnchorPrompt, max_model_len: int, vocab_size: int) -> None:
    length = len(prompt.token_ids)
    if length == 0:
        raise ValueError(f"{prompt}: the prompt is empty; an anchor needs at least one token of context")
    if prompt.max_new_tokens < 1:
        raise ValueError(f"{prompt}: max_new_tokens must be at least 1, got {prompt.max_new_tokens}")
    if length + prompt.max_new_tokens > max_model_len:
        raise ValueError(
            f"{prompt}: {length} prompt tokens + {prompt.max_new_tokens} new tokens are more than the engine's "
            f"limit of {max_model_len} (rollout.max_model_len); shorten the prompt or the completion limit, or "
            "raise the engine's limit"
        )
    check_token_ids(prompt.token_ids, vocab_size, str(prompt))


def group_rollouts(
    requests: Sequence[RolloutRequest],
    completions: Sequence[tuple[Completion, ...]],
    cached_tokens: Sequence[int],
    weight_version: int,
) -> list[Rollout]:
    """Puts the completions of all anchors, in the order of `anchor_prompts`, back into one rollout per request."""
    rollouts = []
    start = 0
    for request in requests:
        stop = start + len(request.reference.anchors)
        rollouts.append(
            Rollout(
                example_id=request.reference.example_id,
                completions=tuple(completions[start:stop]),
                weight_version=weight_version,
                cached_tokens=sum(cached_tokens[start:stop]),
            )
        )
        start = stop
    if start != len(completions):
        raise RuntimeError(f"{len(completions)} groups of completions came back for {start} anchors")
    return rollouts
