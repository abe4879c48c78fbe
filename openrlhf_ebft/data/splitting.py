"""Which rows are held out: a pure function of each row's own content."""

from __future__ import annotations

import hashlib

_RANGE = 1 << 64


def content_hash(prompt: str, ground_truth: str) -> int:
    """Returns a number in [0, 2**64) from a row's texts, kept apart: ("a", "bc") and ("ab", "c") differ."""
    digest = hashlib.blake2b(digest_size=8)
    for text in (prompt, ground_truth):
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "big")


def is_heldout(row_hash: int, fraction: float) -> bool:
    """Whether a row is held out. Other rows do not matter, so rows may be added; equal rows land on one side.

    A larger fraction holds out the same rows and more.
    """
    return row_hash < fraction * _RANGE
