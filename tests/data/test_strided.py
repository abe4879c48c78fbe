"""Strided mode: documents and answers to references with many anchors."""

import pytest
import torch

from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.load import load_data
from tests.tiny_models import EOS_ID

STRIDED = {"mode": "strided", "stride": 4, "context_length": 8, "generate_max_len": 4, "sequence_length": 32}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def load(config, tokenizer):
    train, heldout, report = load_data(config, tokenizer)
    assert heldout == []
    for reference in train:
        RolloutTree.without_branches(reference)  # checks anchors, windows, documents
    return train, report


def text(length, start=0):
    """`length` tokens of the letter tokenizer, one a letter (no merge of it occurs in alphabetical order)."""
    return "".join(LETTERS[(start + i) % 26] for i in range(length))


@pytest.fixture
def documents(write_rows, make_config):
    def make(lengths, **data):
        rows = [{"text": text(length, start)} for start, length in enumerate(lengths)]
        return make_config(write_rows(rows), **{**STRIDED, "text_column": "text", "append_eos": False, **data})

    return make


def test_one_document(documents, tokenizer):
    (reference,), _ = load(documents([31], append_eos=True), tokenizer)
    assert reference.token_ids.tolist() == [*tokenizer(text(31))["input_ids"], EOS_ID]
    assert reference.anchors.tolist() == [8, 12, 16, 20, 24, 28]
    assert reference.window_lengths.tolist() == reference.max_new_tokens.tolist() == [4] * 6
    assert reference.loss_mask.all() and reference.document_ids is None


def test_long_documents_are_cut_and_short_ones_left_out(documents, tokenizer):
    train, report = load(documents([70, 11, 12, 43]), tokenizer)
    assert [reference.token_ids.numel() for reference in train] == [32, 32, 12, 32]
    assert [reference.anchors.numel() for reference in train] == [6, 6, 1, 6]
    assert len({reference.example_id for reference in train}) == 4
    assert (report.rows_read, report.train_rows, report.skipped) == (4, 3, {"no anchor": 1})
    assert report.changed == {"pieces without an anchor left out": 2}
    assert "11 tokens hold no anchor" in report.summary()
    assert "training: 4 references of at most 32 tokens, 19 anchors" in report.summary()


def test_packed_documents_keep_their_anchors(documents, tokenizer):
    lengths = [20, 12, 30, 15, 13, 40]
    alone, _ = load(documents(lengths), tokenizer)
    packed, _ = load(documents(lengths, pack_documents=True), tokenizer)
    assert len(packed) < len(alone)
    assert all(reference.token_ids.numel() <= 32 for reference in packed)
    contexts = []
    for reference in packed:
        ids = reference.document_ids
        for anchor in reference.anchors.tolist():
            start = 0 if ids is None else int((ids < ids[anchor]).sum())
            contexts.append(tuple(reference.token_ids[start : anchor + 4].tolist()))
    expected = [tuple(r.token_ids[: a + 4].tolist()) for r in alone for a in r.anchors.tolist()]
    assert sorted(contexts) == sorted(expected)


def test_answers_of_pairs(write_rows, make_config, tokenizer):
    rows = [{"prompt": text(10), "ground_truth": text(20)}, {"prompt": text(3), "ground_truth": text(15, 9)}]
    (first, second), _ = load(make_config(write_rows(rows), **STRIDED), tokenizer)
    assert first.anchors.tolist() == [10, 14, 18, 22, 26]  # 31 tokens with EOS
    assert second.anchors.tolist() == [8, 12]  # context_length is longer than the prompt
    assert first.loss_mask.tolist() == [False] * 10 + [True] * 21
    later, _ = load(make_config(write_rows(rows), **STRIDED, min_completion_prefix=6), tokenizer)
    assert [r.anchors.tolist() for r in later] == [[16, 20, 24], [9, 13]]


def test_answers_of_chats(write_rows, make_config, chat_tokenizer):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text(14)}]
    config = make_config(write_rows([{"chat": chat}]), **{**STRIDED, "sequence_length": 64}, messages_column="chat")
    (reference,), _ = load(config, chat_tokenizer)
    prompt = len(chat_tokenizer("user: hi\nassistant: ")["input_ids"])
    assert reference.anchors.tolist() == [prompt, prompt + 4, prompt + 8]
    assert reference.loss_mask.tolist() == [False] * prompt + [True] * 15


def test_folder_of_text_files(tmp_path, make_config, tokenizer):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.py").write_text(text(14, 3))
    (tmp_path / "one.txt").write_text(text(13))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    config = make_config(tmp_path, **STRIDED, text_column="text", append_eos=False)
    train, _ = load(config, tokenizer)
    assert [reference.token_ids.numel() for reference in train] == [14, 13]
    (tmp_path / "rows.jsonl").write_text("{}")  # would not be missed
    _, report = load(config, tokenizer)
    assert any(note.startswith(f"not read in {tmp_path}: rows.jsonl (") for note in report.notes)
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"bad\.md: not UTF-8 text: byte 0xff"):
        load(config, tokenizer)


def test_nothing_to_train_is_said(documents, tokenizer):
    with pytest.raises(DataError, match=r"no row can be used[\s\S]*1 x no anchor"):
        load(documents([11]), tokenizer)
    with pytest.raises(DataError, match="column 'body' is missing; columns: text"):
        load(documents([20], text_column="body"), tokenizer)


def test_pieces_of_a_document_stay_on_one_side(documents, tokenizer):
    config = documents([200] * 26, heldout_fraction=0.5)
    train, heldout, report = load_data(config, tokenizer)
    names = [{reference.example_id.split(".")[0] for reference in side} for side in (train, heldout)]
    assert names[0] and names[1] and not names[0] & names[1]
    assert (report.train_rows, report.heldout_rows) == (len(names[0]), len(names[1]))
    assert len({reference.example_id.split(".")[0] for reference in heldout[:6]}) > 3, "evaluations mix documents"
    assert all(torch.equal(reference.window_lengths, reference.max_new_tokens) for reference in train)
