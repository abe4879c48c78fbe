"""Where completions branch off a document: every `stride` tokens, behind enough context and before enough ground truth.

Definitions: "Matching Features, Not Tokens" (arXiv 2603.12248); S tokens of a reference, A anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StrideSettings:
    """Distances in tokens; `stride`, `context_length` and `generate_max_len` at least 1."""

    stride: int  # between anchors
    context_length: int  # of a document before its first anchor
    generate_max_len: int  # of a window and its completions
    min_completion_prefix: int = 0  # of an answer before its first anchor

    def __post_init__(self) -> None:
        for name, least in (
            ("stride", 1),
            ("context_length", 1),
            ("generate_max_len", 1),
            ("min_completion_prefix", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def answer_anchors(answer_mask: Tensor, document_ids: Tensor | None, settings: StrideSettings) -> Tensor:
    """Anchors of every answer of every document: each document has those that it would have alone.

    The first anchor of an answer lies `context_length` tokens into its document or `min_completion_prefix` into the
    answer, whichever is later; a window never reaches beyond the answer. In a raw document of S tokens these are
    (S - generate_max_len - context_length) // stride + 1 anchors, or none.

    Args:
        answer_mask: (S,) bool, tokens of answers; all of them for raw documents.
        document_ids: (S,) int64, non-decreasing, or None for a single document.
        settings: the distances.

    Returns:
        (A,) int64, ascending; context and window of an anchor lie in one document, its window in one answer.
    """
    if document_ids is None:
        document_ids = torch.zeros_like(answer_mask, dtype=torch.int64)
    if document_ids.shape != answer_mask.shape:
        raise ValueError(f"{document_ids.numel()} document ids for an answer mask of {answer_mask.numel()} tokens")
    index = torch.arange(answer_mask.numel())
    document_starts = _run_starts(document_ids)
    starts = _run_starts(2 * document_ids + answer_mask)  # a run ends where either changes
    lengths = torch.diff(torch.cat([index[starts], torch.tensor([answer_mask.numel()])]))
    context_start = torch.cummax(torch.where(document_starts, index, 0), 0).values
    spans = [
        _span_anchors(start, start + length, int(context_start[start]), settings)
        for start, length in zip(index[starts].tolist(), lengths.tolist(), strict=True)
        if answer_mask[start]
    ]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def _span_anchors(start: int, stop: int, context_start: int, settings: StrideSettings) -> Tensor:
    """(A,) anchors in an answer that covers the tokens [start, stop) of a document that begins at `context_start`."""
    first = max(context_start + settings.context_length, start + settings.min_completion_prefix)
    return torch.arange(first, max(stop - settings.generate_max_len + 1, first), settings.stride)


def _run_starts(values: Tensor) -> Tensor:
    """(S,) bool: where a run of equal values begins."""
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[1:] = values[1:] != values[:-1]
    return starts
