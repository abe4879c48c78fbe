"""Tokenizers are ready to use or refused with their name."""

import json

import pytest
from transformers import AutoTokenizer

from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.tokenizers import (
    load_run_tokenizer,
    load_tokenizer,
    read_chat_template,
    stop_token_ids,
    unpooled_token_ids,
)
from tests.tiny_models import CHAT_TEMPLATE, EOS_ID, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer(tmp_path)
    return tmp_path


def change_config(folder, **changes):
    path = folder / "tokenizer_config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_pad_token_stays_when_there_is_one(folder, caplog):
    assert load_tokenizer(str(folder)).pad_token == "<pad>"
    assert caplog.text == ""


def test_missing_pad_token_becomes_eos_and_is_said(folder, caplog):
    change_config(folder, pad_token=None)
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    assert load_tokenizer(str(folder)).pad_token_id == EOS_ID
    assert caplog.text.count("has no pad token") == 1
    assert str(folder) in caplog.text


def test_missing_eos_token_is_an_error(folder):
    change_config(folder, eos_token=None)
    with pytest.raises(DataError, match="has no EOS token"):
        load_tokenizer(str(folder))


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match="could not be loaded"):
        load_tokenizer(str(tmp_path))


def test_chat_template_file_replaces_the_tokenizers(folder, tmp_path, make_config):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    config = make_config("x", chat_template=str(template), apply_chat_template=True)
    config.model.path = str(folder)
    assert load_run_tokenizer(config).chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"{% if x %}\n{{ y", "line 2: "), (b"\xff", "can't decode byte 0xff")],
)
def test_chat_template_files_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_chat_template(str(path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "stops"), [(None, [EOS_ID]), (EOS_ID, [EOS_ID]), (7, [EOS_ID, 7]), ([9, 7, EOS_ID], [EOS_ID, 7, 9])]
)
def test_stop_ids_are_those_of_tokenizer_and_generation_config(folder, declared, stops):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared, "temperature": 0.1}))
    assert stop_token_ids(load_tokenizer(str(folder)), str(folder)) == tuple(stops)


@pytest.mark.parametrize("declared", ["<eos>", [EOS_ID, "<eos>"], [[EOS_ID]], True, 1.5])
def test_stop_ids_that_are_no_token_ids_are_named(folder, declared):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    with pytest.raises(DataError, match=r"generation_config\.json of .*: eos_token_id = .* must be a token id"):
        stop_token_ids(load_tokenizer(str(folder)), str(folder))


@pytest.mark.parametrize("content", ["[]", "null", "{"])
def test_damaged_generation_config_leaves_the_tokenizers_eos_and_is_said(folder, content, caplog):
    (folder / "generation_config.json").write_text(content)
    assert stop_token_ids(load_tokenizer(str(folder)), str(folder)) == (EOS_ID,)
    assert "only the tokenizer's EOS stops completions" in caplog.text


def test_folder_without_generation_config_stops_at_the_tokenizers_eos(folder):
    assert stop_token_ids(load_tokenizer(str(folder)), str(folder)) == (EOS_ID,)


def test_ends_of_turns_are_not_pooled_though_the_tokenizer_does_not_call_them_special(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 7]}))
    tokenizer = load_tokenizer(str(folder))
    assert unpooled_token_ids(tokenizer, str(folder)) == (0, EOS_ID, 2, 7)  # <pad> <eos> <unk>, and the end of a turn


def test_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="could not be loaded"):
        load_tokenizer(str(folder))
