"""Cutting and packing of token sequences."""

import random

import pytest

from openrlhf_ebft.data.packing import cut_lengths, pack_rows


@pytest.mark.parametrize(("tokens", "pieces"), [(0, []), (3, [3]), (8, [8]), (9, [8, 1]), (24, [8, 8, 8])])
def test_pieces(tokens, pieces):
    assert cut_lengths(tokens, 8) == pieces


def test_every_sequence_lies_in_one_row_with_room():
    draw = random.Random(0)
    lengths = [draw.randint(1, 10) for _ in range(200)]
    rows = pack_rows(lengths, 10)
    assert sorted(number for row in rows for number in row) == list(range(200))
    assert all(sum(lengths[number] for number in row) <= 10 for row in rows)
    assert len(rows) <= sum(lengths) / 10 * 1.2, "little room is left"
    assert pack_rows(lengths, 10) == rows
    assert pack_rows([4, 7, 6, 3], 10) == [[0, 2], [1, 3]]


def test_over_long_sequences_are_named():
    with pytest.raises(ValueError, match="sequence 1 of 11 tokens does not fit a row of 10"):
        pack_rows([3, 11], 10)
