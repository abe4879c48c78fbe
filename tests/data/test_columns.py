"""Columns that reward.function asks for: they stay with their row through chats, windows, pieces and packing."""

import pytest

from openrlhf_ebft.core.experience import Completion
from openrlhf_ebft.core.turns import own_history_reference
from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.load import load_data
from openrlhf_ebft.trainer.manifests import data_fingerprint

ROWS = [{"prompt": "abc", "ground_truth": "de", "answer": [i, "x"], "level": i / 2} for i in range(3)]
STRIDED = {"mode": "strided", "stride": 4, "context_length": 4, "generate_max_len": 4, "sequence_length": 32}


def test_values_are_those_of_the_row_and_columns_that_nobody_asks_for_are_left_out(tokenizer, write_rows, make_config):
    config = make_config(write_rows(ROWS))
    train, _, _ = load_data(config, tokenizer, ["answer", "level"])
    assert [reference.columns for reference in train] == [({"answer": [i, "x"], "level": i / 2},) for i in range(3)]
    assert train[1].columns_at(int(train[1].anchors[0])) == {"answer": [1, "x"], "level": 0.5}
    plain, _, _ = load_data(config, tokenizer)
    assert all(reference.columns == () and reference.columns_at(0) == {} for reference in plain)


def test_other_values_are_other_data(tokenizer, write_rows, make_config):
    """Ids and tokens are the same; a resumed run must still notice."""
    prints = [
        data_fingerprint(load_data(make_config(write_rows(rows)), tokenizer, ["level"])[0])
        for rows in (ROWS, [{**row, "level": 9} for row in ROWS])
    ]
    assert prints[0] != prints[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answers": 1}, "rows.jsonl:4: column 'answer' is missing; did you mean 'answers'.*reward.function"),
        ({"answer": None}, "rows.jsonl:4: column 'answer' is null .reward.function has a parameter of that name"),
    ],
)
def test_a_row_without_the_column_is_a_faulty_row(tokenizer, write_rows, make_config, row, message):
    path = write_rows([*ROWS, {"prompt": "abc", "ground_truth": "f", **row}])
    with pytest.raises(DataError, match=message):
        load_data(make_config(path), tokenizer, ["answer"])
    train, _, report = load_data(make_config(path, on_bad_row="skip"), tokenizer, ["answer"])
    assert len(train) == 3 and sum(report.skipped.values()) == 1


def test_every_turn_of_a_chat_has_its_row_s_values(chat_tokenizer, write_rows, make_config):
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b")) * 2]
    path = write_rows([{"chat": chat, "answer": "b"}])
    (reference,), _, _ = load_data(make_config(path, messages_column="chat", turns="all"), chat_tokenizer, ["answer"])
    assert [reference.columns_at(int(anchor)) for anchor in reference.anchors] == [{"answer": "b"}] * 2
    second = own_history_reference(reference, [Completion((5, 6), (0.0, 0.0), "length")])
    assert second.columns_at(int(second.anchors[0])) == {"answer": "b"}


def test_pieces_and_packed_documents_keep_their_rows_apart(tokenizer, write_rows, make_config):
    rows = [{"text": "abcdefghijklmnopqrstuvwxyz"[:size] * times, "id": size} for size, times in ((12, 1), (13, 4))]
    config = make_config(write_rows(rows), **STRIDED, text_column="text", append_eos=False, pack_documents=True)
    train, _, _ = load_data(config, tokenizer, ["id"])
    assert len(train) > 1, "the second document is cut"
    found = {}
    for reference in train:
        for anchor in reference.anchors.tolist():
            letter = tokenizer.decode(reference.token_ids[reference.documents == reference.documents[anchor]][-1:])
            found.setdefault(reference.columns_at(anchor)["id"], set()).add(letter)
    assert set(found) == {12, 13}
    assert "l" in found[12] and "m" not in found[12], "the document of twelve letters ends with the twelfth"
    with pytest.raises(DataError, match="column 'answer' is missing; columns: text, id"):
        load_data(config, tokenizer, ["answer"])
