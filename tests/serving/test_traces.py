"""Texts of single tokens: joined they are the whole text, a character is never cut."""

import pytest
from transformers import AutoTokenizer

from openrlhf_ebft.serving.traces import token_texts
from tests.tiny_models import tiny_byte_tokenizer, tiny_tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tiny_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["a😀世b", "hello", "", "ä", "😀😀", "e\u0301 x", "  two  spaces \n"])
def test_pieces_joined_are_the_text(byte_tokenizer, text):
    ids = byte_tokenizer(text).input_ids
    pieces = token_texts(byte_tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_belongs_to_its_last_token(byte_tokenizer):
    assert token_texts(byte_tokenizer, byte_tokenizer("a😀b").input_ids) == ["a", "", "", "", "😀", "b"]


def test_half_a_character_at_the_end_is_shown_once(byte_tokenizer):
    ids = byte_tokenizer("a😀").input_ids[:3]
    assert "".join(token_texts(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


def test_words_of_a_plain_tokenizer(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    assert token_texts(tokenizer, tokenizer("hello the").input_ids) == ["hello", " ", "t", "he"]
