"""Rows to turns of text: the configured columns, or the messages of a chat, checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config.sections import DataConfig
from openrlhf_ebft.data.chats import Turn, chat_turns, read_messages, render
from openrlhf_ebft.data.errors import DataError, RowFault, check_text, kind_of
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.rows import Row


@dataclass(frozen=True)
class Example:
    """Prompts and ground truths as text: one of each, or one for every turn of a chat that is trained on."""

    place: str
    turns: tuple[Turn, ...]  # at least one
    is_templated: bool  # the text went through a chat template, which writes the special tokens itself
    columns: Mapping[str, Any] = field(default_factory=dict)  # further columns of the row, as they stand there

    @property
    def prompt(self) -> str:
        """Everything before the last ground truth."""
        return "".join(turn.prompt + turn.ground_truth for turn in self.turns[:-1]) + self.turns[-1].prompt

    @property
    def ground_truth(self) -> str:
        """The last ground truth."""
        return self.turns[-1].ground_truth


def make_examples(
    rows: Iterable[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: DataReport,
    columns: Sequence[str] = (),
) -> Iterator[Example]:
    """Yields the example of every sound row, with `columns`; faulty ones are errors or counts, as `report` says.

    Raises:
        DataError: a chat template is needed and the tokenizer has none; in strict mode, the first faulty row.
    """
    if config.messages_column is not None or config.apply_chat_template:
        _require_template(config, tokenizer)
    for row in rows:
        try:
            if config.messages_column is not None:
                example = _from_messages(row, config, config.messages_column, tokenizer)
            else:
                example = _from_columns(row, config, tokenizer)
            example = replace(example, columns=further_columns(row, columns))
        except RowFault as fault:
            report.fault(row.place, fault.reason, str(fault))
        else:
            yield example


def _from_columns(row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Example:
    prompt = row_text(row, config.prompt_column, "prompt")
    ground_truth = row_text(row, config.ground_truth_column, "ground truth")
    if config.apply_chat_template:
        prompt = render([{"role": "user", "content": prompt}], tokenizer)
    return Example(row.place, (Turn(prompt, ground_truth),), config.apply_chat_template)


def _from_messages(row: Row, config: DataConfig, column: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    messages = read_messages(_column(row, column), column)
    return Example(row.place, chat_turns(messages, column, tokenizer, every_turn=config.turns == "all"), True)


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


def further_columns(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    """Returns the columns that reward.function asks for. Raises RowFault where one is missing or null."""
    try:
        return {column: _column(row, column) for column in columns}
    except RowFault as fault:
        raise RowFault(fault.reason, f"{fault} (reward.function has a parameter of that name)") from None


def row_text(row: Row, column: str, role: str) -> str:
    """Returns the text of a column. Raises RowFault where it is missing, null, no text or empty; `role` names it."""
    value = _column(row, column)
    if not isinstance(value, str):
        raise RowFault("non-text value", f"column {column!r} must be text, but is {kind_of(value)}")
    return check_text(value, f"column {column!r}", role)


def _require_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    template = tokenizer.chat_template
    if template is not None and (isinstance(template, str) or "default" in template):
        return
    cause = "data.apply_chat_template" if config.apply_chat_template else "data.messages_column"
    off = "false" if config.apply_chat_template else "null"
    raise DataError(
        f"tokenizer {tokenizer.name_or_path!r} has no {'' if template is None else 'default '}chat template, but "
        f"{cause} needs one: "
        f"set data.chat_template to a Jinja file, or {cause} to {off} for plain text"
    )
