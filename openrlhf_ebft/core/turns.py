"""Chats on the model's own history: each assistant turn as a reference behind the answers that the policy gave before.

With the ground-truth history all turns of a chat are anchors of one reference. On the policy's own history every turn
has another context, so each becomes a reference of its own, made when the answers before it have been sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openrlhf_ebft.core.experience import Completion, Reference


def own_history_reference(chat: Reference, answers: Sequence[Completion]) -> Reference:
    """The turn behind `answers` as a reference with one anchor, called `CHAT/turn-N` with N from 0.

    An answer takes the place of its turn's ground truth. A stop token at its end is left out, and the tokens that
    close the ground truth (`Reference.closings`) follow, so that the context reads as the chat template writes it.

    Args:
        chat: a chat with an anchor for every assistant turn.
        answers: the policy's completions of its first turns, fewer than it has.
    """
    turn = len(answers)
    if turn >= chat.anchors.numel():
        raise ValueError(f"{chat.example_id}: {turn} answers, but the chat has only {chat.anchors.numel()} turns")
    parts = [
        part for number, answer in enumerate(answers) for part in (_prompt(chat, number), _said(chat, number, answer))
    ]
    context = torch.cat([*parts, _prompt(chat, turn)])
    truth = _window(chat, turn)
    return Reference(
        example_id=_turn_name(chat, turn),
        token_ids=torch.cat([context, truth]),
        anchors=torch.tensor([context.numel()]),
        window_lengths=chat.window_lengths[turn : turn + 1],
        max_new_tokens=chat.max_new_tokens[turn : turn + 1],
        loss_mask=torch.arange(context.numel() + truth.numel()) >= context.numel(),
        columns=chat.columns,
    )


def first_turn(chat: Reference) -> str:
    """Example id of the chat's first turn on the policy's own history."""
    return _turn_name(chat, 0)


def _turn_name(chat: Reference, turn: int) -> str:
    return f"{chat.example_id}/turn-{turn}"


def longest_own_history(chat: Reference) -> int:
    """Tokens of the longest sequence that `own_history_reference` can lead to, completions included."""
    length, longest = 0, 0
    for turn in range(chat.anchors.numel()):
        length += _prompt(chat, turn).numel()
        limit, window = int(chat.max_new_tokens[turn]), int(chat.window_lengths[turn])
        longest = max(longest, length + max(limit, window))  # each turn is a reference with its ground truth
        length += limit + _closing(chat, turn).numel()
    return longest


def _window(chat: Reference, turn: int) -> Tensor:
    anchor = int(chat.anchors[turn])
    return chat.token_ids[anchor : anchor + int(chat.window_lengths[turn])]


def _prompt(chat: Reference, turn: int) -> Tensor:
    """What stands between the turn before and this one."""
    start = int(chat.anchors[turn - 1] + chat.window_lengths[turn - 1]) if turn else 0
    return chat.token_ids[start : int(chat.anchors[turn])]


def _closing(chat: Reference, turn: int) -> Tensor:
    count = 0 if chat.closings is None else int(chat.closings[turn])
    window = _window(chat, turn)
    return window[window.numel() - count :]


def _said(chat: Reference, turn: int, answer: Completion) -> Tensor:
    tokens = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
    return torch.cat([torch.tensor(tokens, dtype=torch.int64), _closing(chat, turn)])
