"""Rows to pairs of text: the configured columns, or the turns of a chat, checked."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config.sections import DataConfig
from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.rows import Row


@dataclass(frozen=True)
class Example:
    """A prompt and its ground truth as text."""

    place: str
    prompt: str
    ground_truth: str
    is_templated: bool  # the prompt went through a chat template, which writes the special tokens itself


class RowFault(Exception):
    """A row that cannot become an example: a reason to count by, and a detail to show."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def make_examples(
    rows: Iterable[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase, report: DataReport
) -> Iterator[Example]:
    """Yields the example of every sound row; faulty ones are errors or counts, as `report` says.

    Raises:
        DataError: a chat template is needed and the tokenizer has none; in strict mode, the first faulty row.
    """
    if config.messages_column is not None or config.apply_chat_template:
        _require_template(config, tokenizer)
    for row in rows:
        try:
            if config.messages_column is not None:
                example = _from_messages(row, config.messages_column, tokenizer)
            else:
                example = _from_columns(row, config, tokenizer)
        except RowFault as fault:
            report.fault(row.place, fault.reason, str(fault))
        else:
            yield example


def _from_columns(row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Example:
    prompt = row_text(row, config.prompt_column, "prompt")
    ground_truth = row_text(row, config.ground_truth_column, "ground truth")
    if config.apply_chat_template:
        prompt = _render([{"role": "user", "content": prompt}], tokenizer)
    return Example(row.place, prompt, ground_truth, config.apply_chat_template)


def _from_messages(row: Row, column: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    messages = _column(row, column)
    if isinstance(messages, str):  # CSV holds no lists
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise RowFault("broken chat messages", f"column {column!r} is text, but no JSON: {error}") from None
    if not isinstance(messages, list):
        raise RowFault(
            "broken chat messages", f"column {column!r} must be a list of messages, but is a {type(messages).__name__}"
        )
    turns = [_turn(column, index, message) for index, message in enumerate(messages)]
    if not turns or turns[-1]["role"] != "assistant":
        last = turns[-1]["role"] if turns else "no message"
        raise RowFault("no ground truth", f"column {column!r} must end with an assistant turn, but ends with {last}")
    if len(turns) == 1:
        raise RowFault("empty prompt", f"column {column!r} has nothing before its assistant turn")
    prompt = _render(turns[:-1], tokenizer)
    return Example(
        row.place, prompt, _check_text(turns[-1]["content"], f"last turn of {column!r}", "ground truth"), True
    )


def _turn(column: str, index: int, message: Any) -> dict[str, str]:
    where = f"message {index + 1} of column {column!r}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowFault("broken chat messages", f"{where} must be an object with role and content")
    content = message.get("content")
    if not isinstance(content, str):
        raise RowFault("non-text value", f"content of {where} must be text, but is {_kind(content)}")
    return {"role": message["role"], "content": content}


def _render(turns: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise RowFault("refused by the chat template", f"the chat template refuses this chat: {error}") from None
    return _check_text(str(rendered), "the rendered chat", "prompt")


def _column(row: Row, column: str) -> Any:
    if column not in row.values:
        names = [str(name) for name in row.values]
        nearest = difflib.get_close_matches(column, names, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"columns: {', '.join(names) or 'none'}"
        raise RowFault("missing column", f"column {column!r} is missing; {hint}")
    value = row.values[column]
    if value is None:
        raise RowFault("null value", f"column {column!r} is null")
    return value


def row_text(row: Row, column: str, role: str) -> str:
    """Returns the text of a column. Raises RowFault where it is missing, null, no text or empty; `role` names it."""
    value = _column(row, column)
    if not isinstance(value, str):
        raise RowFault("non-text value", f"column {column!r} must be text, but is {_kind(value)}")
    return _check_text(value, f"column {column!r}", role)


def _check_text(text: str, where: str, role: str) -> str:
    if not text.strip():
        raise RowFault(f"empty {role}", f"{where} is empty: the {role} needs at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Reading marks an undecodable byte 0xNN as U+DCNN.
        what = f"byte {code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else f"half a surrogate pair U+{code:04X}"
        raise RowFault("not UTF-8", f"{where} is not UTF-8 text: {what} at character {error.start}") from None
    return text


def _require_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.chat_template is not None:
        return
    cause = "data.apply_chat_template" if config.apply_chat_template else "data.messages_column"
    off = "false" if config.apply_chat_template else "null"
    raise DataError(
        f"tokenizer {tokenizer.name_or_path!r} has no chat template, but {cause} needs one: "
        f"set data.chat_template to a Jinja file, or {cause} to {off} for plain text"
    )


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__} ({value!r:.40})"
