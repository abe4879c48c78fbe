"""Token sequences of any length into rows of at most a given length."""

from __future__ import annotations

from collections.abc import Sequence


def cut_lengths(num_tokens: int, limit: int) -> list[int]:
    """Lengths of the consecutive pieces of a sequence: `limit` tokens each, the last one what is left."""
    full, rest = divmod(num_tokens, limit)
    return [limit] * full + ([rest] if rest else [])


def pack_rows(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Puts sequence numbers into rows whose lengths add up to at most `limit`; deterministic.

    Each sequence goes into the first row with room; rows come in the order of their first sequence.

    Raises:
        ValueError: a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    open_rows: list[int] = []  # rows that are not full, in order
    for number, length in enumerate(lengths):
        if length > limit:
            raise ValueError(f"sequence {number} of {length} tokens does not fit a row of {limit}")
        row = next((row for row in open_rows if room[row] >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(limit)
            open_rows.append(row)
        rows[row].append(number)
        room[row] -= length
        if room[row] == 0:
            open_rows.remove(row)
    return rows
