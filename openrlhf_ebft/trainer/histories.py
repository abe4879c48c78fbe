"""Samples a batch of references, turn after turn where chats go on from the policy's own answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from openrlhf_ebft.core.experience import Completion, Reference, Rollout, RolloutRequest
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.core.turns import own_history_reference

Generate = Callable[[Sequence[RolloutRequest]], list[Rollout]]


def sample_references(
    generate: Generate, requests: Sequence[RolloutRequest], history: Literal["ground_truth", "own"]
) -> tuple[list[Reference], list[Rollout]]:
    """References and their rollouts, in the same order.

    On the ground-truth history these are the references of the requests. On the policy's own history every assistant
    turn is a reference of its own: one round of sampling for the first turns, one for the second, and so on; the first
    completion of a turn is what the next turn stands behind.
    """
    if history == "ground_truth":
        return [request.reference for request in requests], generate(requests)
    answers: list[list[Completion]] = [[] for _ in requests]
    references: list[Reference] = []
    rollouts: list[Rollout] = []
    turns = [request.reference.anchors.numel() for request in requests]
    for turn in range(max(turns, default=0)):
        open_chats = [number for number, count in enumerate(turns) if count > turn]
        asked = [_turn_request(requests[number], turn, answers[number]) for number in open_chats]
        made = generate(asked)
        references += [request.reference for request in asked]
        rollouts += made
        for number, rollout in zip(open_chats, made, strict=True):
            answers[number].append(rollout.completions[0][0])
    return references, rollouts


def _turn_request(chat: RolloutRequest, turn: int, answers: Sequence[Completion]) -> RolloutRequest:
    reference = own_history_reference(chat.reference, answers)
    return replace(chat, reference=reference, seed=derive_seed(chat.seed, "turn", turn))
