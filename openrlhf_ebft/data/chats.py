"""Messages of a chat to turns: what stands before each assistant turn, and the turn itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.data.errors import RowFault, check_text, kind_of
from openrlhf_ebft.data.tokenizers import stop_token_ids

Message = dict[str, str]
"""`role` and `content`."""

# What a template's own expressions raise.
_TEMPLATE_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Turn:
    """A ground truth and the text since the ground truth before it (since the beginning, for the first)."""

    prompt: str
    ground_truth: str


def read_messages(value: Any, column: str) -> list[Message]:
    """The messages in a row's `column`: a list, or JSON text of one (CSV holds no lists).

    Raises:
        RowFault: no list of objects with role and content, or one that does not end with an assistant turn.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowFault("broken chat messages", f"column {column!r} is text, but no JSON: {error}") from None
    if not isinstance(value, list):
        raise RowFault(
            "broken chat messages", f"column {column!r} must be a list of messages, but is a {type(value).__name__}"
        )
    messages = [_message(column, index, message) for index, message in enumerate(value)]
    if not messages or messages[-1]["role"] != "assistant":
        last = messages[-1]["role"] if messages else "no message"
        raise RowFault("no ground truth", f"column {column!r} must end with an assistant turn, but ends with {last}")
    if len(messages) == 1:
        raise RowFault("empty prompt", f"column {column!r} has nothing before its assistant turn")
    return messages


def chat_turns(
    messages: Sequence[Message], column: str, tokenizer: PreTrainedTokenizerBase, *, every_turn: bool
) -> tuple[Turn, ...]:
    """The last assistant turn, or with `every_turn` all of them that something stands before.

    Raises:
        RowFault: an empty turn, or a chat template that refuses the chat or writes an assistant turn differently once
            the chat goes on: such a history is not what the model continued.
    """
    last = len(messages) - 1
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    turns: list[Turn] = []
    before = ""
    for place in places if every_turn else [last]:
        rendered = render(messages[:place], tokenizer)
        if not rendered.startswith(before):
            raise RowFault(
                "rewritten by the chat template",
                f"the chat template writes what stands before message {place + 1} of column {column!r} differently "
                "from what the earlier assistant turn continued: set data.turns to last",
            )
        where = f"last turn of {column!r}" if place == last else f"message {place + 1} of {column!r}"
        truth = check_text(messages[place]["content"], where, "ground truth")
        turns.append(Turn(rendered[len(before) :], truth))
        before = rendered + truth
    return tuple(turns)


def render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt that a chat template makes of `messages`. Raises RowFault when it refuses them or makes no text."""
    try:
        rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except _TEMPLATE_FAULTS as error:
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise RowFault("refused by the chat template", f"the chat template refuses this chat: {kind}{error}") from None
    return check_text(str(rendered), "the rendered chat", "prompt")


def turn_end_id(tokenizer: PreTrainedTokenizerBase, model_path: str) -> int:
    """The token that ends an assistant's turn in a templated chat: what the template writes behind the content.

    EOS where the template writes something else there than a token that ends a completion, or nothing.
    """
    eos: int = tokenizer.eos_token_id
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        before = render([question], tokenizer) + answer["content"]
        whole = str(tokenizer.apply_chat_template([question, answer], tokenize=False))
    except (RowFault, *_TEMPLATE_FAULTS):  # such a template may want a chat of another form
        return eos
    if not whole.startswith(before):
        return eos
    behind = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"][:1]
    return behind[0] if behind and behind[0] in stop_token_ids(tokenizer, model_path) else eos


def _message(column: str, index: int, message: Any) -> Message:
    where = f"message {index + 1} of column {column!r}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowFault("broken chat messages", f"{where} must be an object with role and content")
    content = message.get("content")
    if not isinstance(content, str):
        raise RowFault("non-text value", f"content of {where} must be text, but is {kind_of(content)}")
    return {"role": message["role"], "content": content}
