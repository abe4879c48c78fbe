"""Checked, tokenised examples of reward training, and the batch of every step."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


def check_examples(texts: Sequence[str], labels: Sequence[float]) -> None:
    """Raise ValueError for what cannot be trained on; the message names the first faulty example.

    Faults: different numbers of texts and labels, no example, an empty text, a label that is not in [0, 1].
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of texts, not one text")
    if len(texts) != len(labels):
        raise ValueError(f"{len(texts)} texts but {len(labels)} labels; give one label per text")
    if len(texts) == 0:
        raise ValueError("no examples: texts is empty")
    for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"example {index} has an empty text: {text!r}")
        if not _is_share(label):
            raise ValueError(f"example {index} has label {label!r}; labels must lie in [0, 1]: {text[:60]!r}")


def _is_share(label: Any) -> bool:
    try:
        return bool(0 <= label <= 1)
    except (TypeError, ValueError, RuntimeError):  # no number, or an array or tensor of several
        return False


@dataclass
class RewardBatch:
    """One batch, right-padded. `input_ids` and `attention_mask` [B, T] int64, `labels` [B] float32."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


class RewardExamples:
    """Tokenised texts with labels; cut to `max_length` tokens from the front of the text, `num_cut` of them.

    Args:
        tokenizer: of the reward model, with a pad token.
        texts, labels: checked by :func:`check_examples`.
        max_length: tokens kept of a text.

    Raises:
        ValueError: as `check_examples`, or a text that has no token.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], labels: Sequence[float], max_length: int) -> None:
        check_examples(texts, labels)
        encoded = tokenizer(list(texts), truncation=True, max_length=max_length)
        self.token_ids: list[list[int]] = encoded["input_ids"]
        for index, ids in enumerate(self.token_ids):
            if not ids:
                raise ValueError(f"example {index} has no token in this tokenizer: {texts[index][:60]!r}")
        self.num_cut = sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
        self.labels = torch.tensor(list(labels), dtype=torch.float32)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def collate(self, indices: Sequence[int], device: torch.device) -> RewardBatch:
        """The examples at `indices`, padded on the right to the longest of them."""
        rows = [self.token_ids[index] for index in indices]
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        return RewardBatch(ids.to(device), mask.to(device), self.labels[list(indices)].to(device))

    def fingerprint(self) -> str:
        """Digest of tokens and labels, by which a checkpoint knows its data."""
        content = json.dumps([self.token_ids, self.labels.tolist()], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()


def batch_indices(examples: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Example numbers of optimizer step `step` (from 0): every epoch is a new seeded order, the last batch is short."""
    per_epoch = math.ceil(examples / batch_size)
    epoch, number = divmod(step, per_epoch)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    return order[number * batch_size : (number + 1) * batch_size]
