"""Documents and answers to references with many anchors (strided mode)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf_ebft.config.sections import DataConfig
from openrlhf_ebft.core.anchors import StrideSettings, answer_anchors
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.data.packing import cut_lengths, pack_rows
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.structured import TurnIds


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """A document, a piece of one, or prompts with their answers: S tokens."""

    name: str  # unique; made from the content
    token_ids: Tensor  # (S,) int64
    answer_mask: Tensor  # (S,) bool: tokens that are trained on
    columns: Mapping[str, Any] = field(default_factory=dict)  # further columns of its row

    def __len__(self) -> int:
        return self.token_ids.numel()


def answered_sequence(name: str, turns: Sequence[TurnIds], columns: Mapping[str, Any]) -> TokenSequence:
    """Prompts and answers of one row behind each other; the answers are trained on."""
    ids, mask = [], []
    for turn in turns:
        ids += [*turn.prompt, *turn.ground_truth]
        mask += [False] * len(turn.prompt) + [True] * len(turn.ground_truth)
    return TokenSequence(name, torch.tensor(ids), torch.tensor(mask), columns)


def stride_settings(config: DataConfig) -> StrideSettings:
    """The distances of strided mode, from the data section."""
    return StrideSettings(
        stride=config.stride,
        context_length=config.context_length,
        generate_max_len=config.generate_max_len,
        min_completion_prefix=config.min_completion_prefix,
    )


def cut_sequence(sequence: TokenSequence, place: str, config: DataConfig, report: DataReport) -> list[TokenSequence]:
    """Pieces of at most `config.sequence_length` tokens that hold an anchor; what is left out is counted.

    A piece is a document of its own: its tokens do not see the piece before.
    """
    settings = stride_settings(config)
    lengths = cut_lengths(len(sequence), config.sequence_length)
    pieces = []
    for number, (ids, mask) in enumerate(
        zip(sequence.token_ids.split(lengths), sequence.answer_mask.split(lengths), strict=True)
    ):
        name = f"{sequence.name}.{number}" if len(lengths) > 1 else sequence.name
        if answer_anchors(mask, None, settings).numel():
            pieces.append(TokenSequence(name, ids, mask, sequence.columns))
    if not pieces:
        detail = (
            f"{len(sequence)} tokens hold no anchor of data.context_length = {config.context_length} and "
            f"data.generate_max_len = {config.generate_max_len}"
        )
        if config.min_completion_prefix:
            detail += f" behind data.min_completion_prefix = {config.min_completion_prefix} tokens of an answer"
        report.skip(place, "no anchor", detail)
    elif len(pieces) < len(lengths):
        lost = len(sequence) - sum(len(piece) for piece in pieces)
        report.change(place, "pieces without an anchor left out", f"{lost} of {len(sequence)} tokens")
    return pieces


def make_references(sequences: Sequence[TokenSequence], config: DataConfig) -> list[Reference]:
    """References of sequences that each hold an anchor: one each, or packed to `config.sequence_length`."""
    if not config.pack_documents:
        return [_reference([sequence], config) for sequence in sequences]
    rows = pack_rows([len(sequence) for sequence in sequences], config.sequence_length)
    return [_reference([sequences[i] for i in row], config) for row in rows]


def _reference(sequences: Sequence[TokenSequence], config: DataConfig) -> Reference:
    """One reference of one or more sequences, each a document that sees only itself."""
    answer_mask = torch.cat([sequence.answer_mask for sequence in sequences])
    documents = None
    if len(sequences) > 1:
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        documents = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    anchors = answer_anchors(answer_mask, documents, stride_settings(config))
    window = torch.full_like(anchors, config.generate_max_len)
    more = f"+{len(sequences) - 1}" if len(sequences) > 1 else ""
    return Reference(
        example_id=sequences[0].name + more,
        token_ids=torch.cat([sequence.token_ids for sequence in sequences]),
        anchors=anchors,
        window_lengths=window,
        max_new_tokens=window.clone(),
        loss_mask=answer_mask,
        document_ids=documents,
        columns=tuple(sequence.columns for sequence in sequences) if sequences[0].columns else (),
    )
