"""All of it together: from the configuration to the references of training and of evaluation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.data.chats import turn_end_id
from openrlhf_ebft.data.documents import read_documents
from openrlhf_ebft.data.errors import DataError, RowFault
from openrlhf_ebft.data.examples import Example, further_columns, make_examples
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.sources import read_rows
from openrlhf_ebft.data.splitting import content_hash, is_heldout
from openrlhf_ebft.data.strided import TokenSequence, answered_sequence, cut_sequence, make_references
from openrlhf_ebft.data.structured import PromptTokenizer, TurnIds, fit_turns, make_reference

logger = logging.getLogger(__name__)

Sides = tuple[list[Reference], list[Reference], Counter[int]]
"""Training and held-out references, and how often each row's content occurred."""


@dataclass(frozen=True)
class EncodedRow:
    """A row that fits the limits, as token ids."""

    row_hash: int  # of its content
    name: str
    place: str
    turns: list[TurnIds]
    columns: Mapping[str, Any]


def load_data(
    config: EBFTConfig, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str] = ()
) -> tuple[list[Reference], list[Reference], DataReport]:
    """Reads, checks, splits and tokenises `config.data`; returns (training, held-out, what became of the rows).

    Example ids depend on the content alone; a repeated row gets a running number. The report is logged, too. The
    references carry the `columns` of their rows.

    Raises:
        DataError: nothing to read, no usable rows, or, in strict mode, the first faulty row with file and row.
    """
    report = DataReport(strict=config.data.on_bad_row == "strict")
    is_templated = config.data.apply_chat_template or config.data.messages_column is not None
    turn_end = turn_end_id(tokenizer, config.model.path) if is_templated else None
    encoder = PromptTokenizer(tokenizer, config.data.append_eos, turn_end)
    if config.data.mode == "strided":
        train, heldout, seen = _load_strided(config, tokenizer, encoder, report, columns)
    else:
        train, heldout, seen = _load_structured(config, tokenizer, encoder, report, columns)
    _finish(report, seen, config)
    return train, heldout, report


def _load_structured(
    config: EBFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    encoder: PromptTokenizer,
    report: DataReport,
    columns: Sequence[str],
) -> Sides:
    train: list[Reference] = []
    heldout: list[Reference] = []
    seen: Counter[int] = Counter()
    for row in _encoded_rows(config, tokenizer, encoder, report, seen, columns):
        side = heldout if is_heldout(row.row_hash, config.data.heldout_fraction) else train
        side.append(make_reference(row.name, row.turns, config.rollout, row.columns))
    report.train_rows, report.heldout_rows = len(train), len(heldout)
    if config.data.turns == "all":
        for label, references in (("training", train), ("held-out", heldout)):
            report.notes.append(f"{label}: {len(references)} chats, {_count_anchors(references)} assistant turns")
    return train, heldout, seen


def _load_strided(
    config: EBFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    encoder: PromptTokenizer,
    report: DataReport,
    columns: Sequence[str],
) -> Sides:
    """A document's pieces stay on one side, and rows are packed from the documents of one side."""
    data = config.data
    sides: tuple[list[TokenSequence], list[TokenSequence]] = ([], [])
    rows = [0, 0]
    seen: Counter[int] = Counter()
    for row_hash, place, sequence in _sequences(config, tokenizer, encoder, report, seen, columns):
        side = int(is_heldout(row_hash, data.heldout_fraction))
        pieces = cut_sequence(sequence, place, data, report)
        sides[side].extend(pieces)
        rows[side] += bool(pieces)
    report.train_rows, report.heldout_rows = rows
    train, heldout = (make_references(side, data) for side in sides)
    # An evaluation takes the first ones: they must not all be pieces of one document.
    heldout.sort(key=lambda reference: content_hash(reference.example_id, ""))
    for name, references in (("training", train), ("held-out", heldout)):
        anchors = _count_anchors(references)
        report.notes.append(
            f"{name}: {len(references)} references of at most {data.sequence_length} tokens, {anchors} anchors"
        )
    return train, heldout, seen


def _count_anchors(references: list[Reference]) -> int:
    return sum(reference.anchors.numel() for reference in references)


def _sequences(
    config: EBFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    encoder: PromptTokenizer,
    report: DataReport,
    seen: Counter[int],
    columns: Sequence[str],
) -> Iterator[tuple[int, str, TokenSequence]]:
    """Yields (content hash, place, tokens) of every document, or of every prompt or chat with its answers."""
    if config.data.text_column is None:
        for answered in _encoded_rows(config, tokenizer, encoder, report, seen, columns):
            yield answered.row_hash, answered.place, answered_sequence(answered.name, answered.turns, answered.columns)
        return
    for row, text in read_documents(config.data, config.data.text_column, report):
        row_hash = content_hash(text, "")
        try:
            further = further_columns(row, columns)
        except RowFault as fault:
            report.fault(row.place, fault.reason, str(fault))
            continue
        ids = torch.tensor(encoder.document_ids(text))
        whole = torch.ones_like(ids, dtype=torch.bool)
        yield row_hash, row.place, TokenSequence(_name(row_hash, seen), ids, whole, further)


def _encoded_rows(
    config: EBFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    encoder: PromptTokenizer,
    report: DataReport,
    seen: Counter[int],
    columns: Sequence[str],
) -> Iterator[EncodedRow]:
    """Yields every row that fits the limits."""
    rows = read_rows(config.data.path, config.data.split, report)
    for example in make_examples(rows, config.data, tokenizer, report, columns):
        turns = _encode(example, encoder, config, report)
        if turns:
            row_hash = content_hash(example.prompt, example.ground_truth)
            yield EncodedRow(row_hash, _name(row_hash, seen), example.place, turns, example.columns)


def _name(row_hash: int, seen: Counter[int]) -> str:
    """An id that depends on the content alone; a repeated row gets a running number."""
    seen[row_hash] += 1
    return f"{row_hash:016x}" + (f"-{seen[row_hash]}" if seen[row_hash] > 1 else "")


def _encode(example: Example, encoder: PromptTokenizer, config: EBFTConfig, report: DataReport) -> list[TurnIds]:
    """Returns the turns that are trained on; none for a row that is left out and counted."""
    data = config.data
    try:
        turns = encoder.turn_ids(example)
    except RowFault as fault:
        report.fault(example.place, fault.reason, str(fault))
        return []
    prompt = turns[0].prompt
    if len(prompt) > data.max_prompt_tokens and data.over_long_prompt == "truncate_left":
        detail = f"prompt of {len(prompt)} tokens cut to the last {data.max_prompt_tokens}"
        report.change(example.place, "prompt truncated", detail)
        turns[0] = replace(turns[0], prompt=encoder.truncate_left(prompt, data.max_prompt_tokens))
    kept, misfits = fit_turns(turns, data)
    for misfit in misfits:
        if misfit.reason == "over-long prompt" and data.over_long_prompt == "error":
            other = "skip" if data.turns == "all" else "skip or truncate_left"
            raise DataError(f"{example.place}: {misfit} (data.over_long_prompt = {other} goes on)")
    if misfits and kept:
        detail = f"{len(misfits)} of {len(turns)} assistant turns have no anchor, first: {misfits[0]}"
        report.change(example.place, "turns left out", detail)
    elif misfits:
        report.skip(example.place, misfits[0].reason, str(misfits[0]))
    return kept


def _finish(report: DataReport, seen: Counter[int], config: EBFTConfig) -> None:
    repeated = seen.total() - len(seen)
    if repeated:
        report.notes.append(f"{repeated} rows repeat an earlier one and are used as often as they stand there")
    if report.train_rows and not report.heldout_rows and config.data.heldout_fraction > 0:
        fraction = config.data.heldout_fraction
        report.notes.append(f"no row is held out: data.heldout_fraction = {fraction} of so few rows; evaluation is off")
    logger.info("%s", report.summary())
    if report.train_rows:
        return
    if report.rows_read == 0:
        raise DataError(f"data.path = {config.data.path}: holds no rows")
    where = f"all {report.heldout_rows} usable rows are held out" if report.heldout_rows else "no row can be used"
    raise DataError(f"data.path = {config.data.path}: {where}\n{report.summary()}")
