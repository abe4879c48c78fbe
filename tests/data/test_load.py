"""From rows to references: what is used, what is left out and counted, what stops a run before it starts."""

import json
import math

import pytest
import torch

from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.load import load_data
from openrlhf_ebft.data.structured import completion_limit
from tests.tiny_models import CHAT_TEMPLATE, EOS_ID, tiny_byte_tokenizer

GOOD = {"prompt": "abc", "ground_truth": "de"}


def load(config, tokenizer):
    train, heldout, report = load_data(config, tokenizer)
    assert heldout == []
    return train, report


def test_reference_of_a_pair(tokenizer, write_rows, make_config):
    (reference,), _ = load(make_config(write_rows([GOOD])), tokenizer)
    prompt, truth = tokenizer("abc")["input_ids"], tokenizer("de")["input_ids"]
    assert reference.token_ids.tolist() == [*prompt, *truth, EOS_ID]
    assert reference.token_ids.dtype == torch.int64
    assert reference.anchors.tolist() == [len(prompt)]
    assert reference.window_lengths.tolist() == [len(truth) + 1]
    assert reference.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(truth) + 1)
    assert reference.max_new_tokens.tolist() == [8]
    assert reference.document_ids is None


def test_prompt_ids_do_not_depend_on_the_ground_truth(tokenizer, write_rows, make_config):
    """ "he" + "llo" would be one token if they were tokenised together."""
    path = write_rows([{"prompt": "he", "ground_truth": "llo"}, {"prompt": "he", "ground_truth": "x"}])
    train, _ = load(make_config(path), tokenizer)
    he = tokenizer("he")["input_ids"]
    assert all(reference.token_ids.tolist()[: len(he)] == he for reference in train)
    assert train[0].token_ids.tolist() == [*he, *tokenizer("llo")["input_ids"], EOS_ID]


@pytest.mark.parametrize(("append", "text", "ends"), [(True, "de", 1), (True, "de<eos>", 1), (False, "de", 0)])
def test_case_b05_exactly_one_eos(tokenizer, write_rows, make_config, append, text, ends):
    path = write_rows([{"prompt": "abc", "ground_truth": text}])
    (reference,), _ = load(make_config(path, append_eos=append), tokenizer)
    window = reference.token_ids.tolist()[int(reference.anchors[0]) :]
    assert window == [*tokenizer("de")["input_ids"], *[EOS_ID] * ends]


def test_eos_inside_a_prompt_is_kept(tokenizer, write_rows, make_config):
    (reference,), _ = load(make_config(write_rows([{"prompt": "a<eos>b", "ground_truth": "c"}])), tokenizer)
    assert reference.token_ids.tolist().count(EOS_ID) == 2
    assert reference.loss_mask.sum() == 2


@pytest.mark.parametrize(
    ("tokens", "multiplier", "floor", "cap", "limit"),
    [(10, 1.5, 8, 256, 15), (3, 1.5, 8, 256, 8), (11, 1.5, 8, 256, 17), (300, 1.5, 8, 256, 256), (50, 1.1, 1, 99, 55)],
)
def test_limit_of_a_completion(make_config, tokens, multiplier, floor, cap, limit):
    rollout = {"length_multiplier": multiplier, "min_length_limit": floor, "max_new_tokens": cap}
    assert completion_limit(tokens, make_config("x", rollout=rollout).rollout) == limit
    assert math.ceil(1.1 * 50) == 56  # what plain floating point would give in the last case


FAULTS = [
    ({"ground_truth": "x"}, "missing column", "column 'prompt' is missing; columns: ground_truth"),
    ({"Prompt": "x", "ground_truth": "x"}, "missing column", "did you mean 'Prompt'?"),
    ({"prompt": "x"}, "missing column", "column 'ground_truth' is missing"),
    ({"prompt": None, "ground_truth": "x"}, "null value", "column 'prompt' is null"),
    ({"prompt": "x", "ground_truth": None}, "null value", "column 'ground_truth' is null"),
    ({"prompt": 3, "ground_truth": "x"}, "non-text value", "column 'prompt' must be text, but is a int (3)"),
    ({"prompt": "x", "ground_truth": ["y"]}, "non-text value", "column 'ground_truth' must be text, but is a list"),
    ({"prompt": "", "ground_truth": "x"}, "empty prompt", "column 'prompt' is empty"),
    ({"prompt": " \n", "ground_truth": "x"}, "empty prompt", "column 'prompt' is empty"),
    ({"prompt": "x", "ground_truth": ""}, "empty ground truth", "column 'ground_truth' is empty"),
    ({"prompt": "x\ud800", "ground_truth": "x"}, "not UTF-8", "half a surrogate pair U+D800 at character 1"),
    ({"prompt": "x", "ground_truth": "a<eos>b"}, "EOS inside", "holds '<eos>' before its end, at token 1"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), FAULTS)
def test_faulty_row_stops_strict_loading(tokenizer, write_rows, make_config, row, reason, detail):
    path = write_rows([GOOD, row])
    with pytest.raises(DataError) as caught:
        load_data(make_config(path), tokenizer)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert detail in str(caught.value)


@pytest.mark.parametrize(("row", "reason", "detail"), FAULTS)
def test_faulty_row_is_counted_in_skip_mode(tokenizer, write_rows, make_config, caplog, row, reason, detail):
    path = write_rows([GOOD, row, GOOD])
    with caplog.at_level("INFO", logger="openrlhf_ebft.data.load"):
        train, report = load(make_config(path, on_bad_row="skip"), tokenizer)
    assert len(train) == 2
    assert report.skipped == {reason: 1}
    assert f"{path}:2: " in report.summary()
    assert detail in report.summary()
    assert "3 rows read, 2 for training, 0 held out, 1 left out" in caplog.text


def test_csv_bytes_that_are_not_utf8_are_a_fault_of_their_row(tokenizer, tmp_path, make_config):
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,ground_truth\na,b\na\xe9,b\n")
    with pytest.raises(DataError, match=r"a\.csv:3 \(row 2\): .*byte 0xe9 at character 1"):
        load_data(make_config(path), tokenizer)
    _, report = load(make_config(path, on_bad_row="skip"), tokenizer)
    assert report.skipped == {"not UTF-8": 1}


def test_all_faults_at_once_are_all_counted(tokenizer, write_rows, make_config):
    path = write_rows([row for row, _, _ in FAULTS] + [GOOD])
    train, report = load(make_config(path, on_bad_row="skip"), tokenizer)
    assert len(train) == 1
    assert report.rows_skipped == len(FAULTS)
    assert report.rows_read == len(FAULTS) + 1


def test_nothing_left_is_an_error_with_the_counts(tokenizer, write_rows, make_config):
    path = write_rows([row for row, _, _ in FAULTS])
    with pytest.raises(DataError, match=r"no row can be used\n(.*\n)*.*3 x missing column"):
        load_data(make_config(path, on_bad_row="skip"), tokenizer)


def test_no_rows_at_all_is_an_error(tokenizer, tmp_path, make_config):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_data(make_config(tmp_path / "a.jsonl"), tokenizer)


PROMPTS = ["abcdefghijklmnopqrstuvwxyz0123456789.,:;"[:n] for n in (7, 8, 9, 40)]
LIMITS = {"max_prompt_tokens": 8, "rollout": {"max_new_tokens": 8, "max_model_len": 16}}


def test_case_b17_long_prompts_are_skipped_and_counted(tokenizer, write_rows, make_config):
    path = write_rows([{"prompt": text, "ground_truth": "d"} for text in PROMPTS])
    train, report = load(make_config(path, **LIMITS), tokenizer)
    assert [reference.anchors.tolist() for reference in train] == [[7], [8]]
    for reference, text in zip(train, PROMPTS, strict=False):
        assert reference.token_ids.tolist()[: len(text)] == tokenizer(text)["input_ids"]
    assert report.skipped == {"over-long prompt": 2}
    assert "prompt of 40 tokens, above data.max_prompt_tokens = 8" in report.summary()


def test_case_b17_long_prompts_stop_the_run(tokenizer, write_rows, make_config):
    path = write_rows([{"prompt": text, "ground_truth": "d"} for text in PROMPTS])
    config = make_config(path, over_long_prompt="error", on_bad_row="skip", **LIMITS)
    with pytest.raises(DataError, match=rf"{path}:3: prompt of 9 tokens, above data.max_prompt_tokens = 8"):
        load_data(config, tokenizer)


def test_case_b17_long_prompts_are_truncated_on_the_left(tokenizer, write_rows, make_config):
    path = write_rows([{"prompt": text, "ground_truth": "d"} for text in PROMPTS])
    train, report = load(make_config(path, over_long_prompt="truncate_left", **LIMITS), tokenizer)
    assert [reference.anchors.tolist() for reference in train] == [[7], [8], [8], [8]]
    assert train[2].token_ids.tolist()[:8] == tokenizer(PROMPTS[2])["input_ids"][-8:]
    assert train[3].token_ids.tolist()[:8] == tokenizer(PROMPTS[3])["input_ids"][-8:]
    assert report.changed == {"prompt truncated": 2}
    assert report.skipped == {}
    for reference in train:
        assert int(reference.anchors[0] + reference.max_new_tokens[0]) <= 16


def test_ground_truths_outside_their_limits_are_counted(tokenizer, write_rows, make_config):
    path = write_rows([{"prompt": "a", "ground_truth": "bcdefgh"[:n]} for n in (1, 2, 3, 4)])
    train, report = load(make_config(path, min_ground_truth_tokens=3, max_ground_truth_tokens=4), tokenizer)
    assert [int(reference.window_lengths[0]) for reference in train] == [3, 4]  # EOS counts
    assert report.skipped == {"short ground truth": 1, "long ground truth": 1}


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
]


def prompt_text(reference, tokenizer):
    return tokenizer.decode(reference.token_ids[: int(reference.anchors[0])])


def window_text(reference, tokenizer):
    return tokenizer.decode(reference.token_ids[int(reference.anchors[0]) :])


def test_last_assistant_turn_is_the_ground_truth(chat_tokenizer, write_rows, make_config):
    earlier = [*CHAT, {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]
    config = make_config(write_rows([{"messages": CHAT}, {"messages": earlier}]), messages_column="messages")
    train, _ = load(config, chat_tokenizer)
    assert prompt_text(train[0], chat_tokenizer) == "system: be brief\nuser: hi\nassistant: "
    assert window_text(train[0], chat_tokenizer) == "hello<eos>"
    expected = "system: be brief\nuser: hi\nassistant: hello\n<eos>user: more\nassistant: "
    assert prompt_text(train[1], chat_tokenizer) == expected
    assert window_text(train[1], chat_tokenizer) == "no<eos>"


def test_plain_prompts_become_a_user_turn(chat_tokenizer, write_rows, make_config):
    config = make_config(write_rows([GOOD]), apply_chat_template=True)
    (reference,), _ = load(config, chat_tokenizer)
    assert prompt_text(reference, chat_tokenizer) == "user: abc\nassistant: "


@pytest.mark.parametrize(
    ("messages", "reason", "detail"),
    [
        ([], "no ground truth", "must end with an assistant turn, but ends with no message"),
        (CHAT[:2], "no ground truth", "but ends with user"),
        (CHAT[2:], "empty prompt", "nothing before its assistant turn"),
        ("hi", "broken chat messages", "is text, but no JSON"),
        ({"role": "user"}, "broken chat messages", "must be a list of messages, but is a dict"),
        (["hi"], "broken chat messages", "message 1 of column 'messages' must be an object with role and content"),
        ([{"content": "x"}, *CHAT], "broken chat messages", "message 1"),
        ([CHAT[0], {"role": "user", "content": None}, CHAT[2]], "non-text value", "content of message 2"),
        ([*CHAT[:2], {"role": "assistant", "content": ""}], "empty ground truth", "last turn of 'messages' is empty"),
        (None, "null value", "column 'messages' is null"),
    ],
)
def test_faulty_chats(chat_tokenizer, write_rows, make_config, messages, reason, detail):
    path = write_rows([{"messages": CHAT}, {"messages": messages}])
    with pytest.raises(DataError) as caught:
        load_data(make_config(path, messages_column="messages"), chat_tokenizer)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert detail in str(caught.value)
    _, report = load(make_config(path, messages_column="messages", on_bad_row="skip"), chat_tokenizer)
    assert report.skipped == {reason: 1}


def test_chats_in_csv_are_json_text(chat_tokenizer, tmp_path, make_config):
    path = tmp_path / "a.csv"
    path.write_text('messages\n"' + json.dumps(CHAT).replace('"', '""') + '"\n')
    (reference,), _ = load(make_config(path, messages_column="messages"), chat_tokenizer)
    assert window_text(reference, chat_tokenizer) == "hello<eos>"


def test_template_that_refuses_a_chat(tmp_path, write_rows, make_config):
    refusing = "{{ raise_exception('no system turns') if messages[0]['role'] == 'system' else messages[0]['content'] }}"
    tokenizer = tiny_byte_tokenizer(tmp_path / "t", chat_template=refusing)
    path = write_rows([{"messages": CHAT[1:]}, {"messages": CHAT}])
    with pytest.raises(DataError, match=r":2: the chat template refuses this chat: no system turns"):
        load_data(make_config(path, messages_column="messages"), tokenizer)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 + messages[0]['content'] }}", "TypeError: unsupported operand"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
    ],
)
def test_case_b16_template_that_fails_is_a_fault_of_the_row(tmp_path, write_rows, make_config, template, words):
    tokenizer = tiny_byte_tokenizer(tmp_path / "t", chat_template=template)
    with pytest.raises(DataError, match=rf":1: the chat template refuses this chat: {words}"):
        load_data(make_config(write_rows([{"messages": CHAT}]), messages_column="messages"), tokenizer)


def test_case_b16_several_templates_without_a_default(tmp_path, write_rows, make_config):
    tokenizer = tiny_byte_tokenizer(tmp_path / "t")
    tokenizer.chat_template = {"tool_use": CHAT_TEMPLATE}
    with pytest.raises(DataError, match="has no default chat template, but data.apply_chat_template needs one"):
        load_data(make_config(write_rows([GOOD]), apply_chat_template=True), tokenizer)


@pytest.mark.parametrize(
    ("rows", "data", "off"),
    [
        ([{"messages": CHAT}], {"messages_column": "messages"}, "data.messages_column to null"),
        ([GOOD], {"apply_chat_template": True}, "data.apply_chat_template to false"),
    ],
)
def test_case_b16_no_chat_template(tokenizer, write_rows, make_config, rows, data, off):
    with pytest.raises(DataError) as caught:
        load_data(make_config(write_rows(rows), on_bad_row="skip", **data), tokenizer)
    assert tokenizer.name_or_path in str(caught.value)
    assert off in str(caught.value)
    assert "data.chat_template" in str(caught.value)
    load_data(make_config(write_rows([GOOD])), tokenizer)  # plain rows need no template


def with_bos(folder, chat_template=None):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_byte_tokenizer(folder, chat_template=chat_template)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def test_bos_once_for_plain_prompts_and_none_before_ground_truths(tmp_path, write_rows, make_config):
    tokenizer = with_bos(tmp_path / "t")
    (reference,), _ = load(make_config(write_rows([GOOD])), tokenizer)
    assert tokenizer.decode(reference.token_ids) == "<s>abcde<eos>"


def test_template_that_writes_bos_gets_no_second_one(tmp_path, write_rows, make_config):
    tokenizer = with_bos(tmp_path / "t", "{{ bos_token }}" + CHAT_TEMPLATE)
    (reference,), _ = load(make_config(write_rows([GOOD]), apply_chat_template=True), tokenizer)
    assert prompt_text(reference, tokenizer) == "<s>user: abc\nassistant: "


@pytest.mark.parametrize("template", [None, "{{ bos_token }}{{ messages[0]['content'] }}"])
def test_duplicate_bos_is_a_fault(tmp_path, write_rows, make_config, template):
    tokenizer = with_bos(tmp_path / "t", template)
    path = write_rows([GOOD, {"prompt": "<s>abc", "ground_truth": "de"}])
    chat = {"apply_chat_template": template is not None}
    with pytest.raises(DataError, match=r":2: the prompt begins with '<s>' twice"):
        load_data(make_config(path, **chat), tokenizer)
    _, report = load(make_config(path, on_bad_row="skip", **chat), tokenizer)
    assert report.skipped == {"duplicate BOS": 1}


def test_truncation_keeps_bos(tmp_path, write_rows, make_config):
    tokenizer = with_bos(tmp_path / "t")
    path = write_rows([{"prompt": "abcdefgh", "ground_truth": "x"}])
    config = make_config(path, max_prompt_tokens=4, over_long_prompt="truncate_left")
    (reference,), _ = load(config, tokenizer)
    assert prompt_text(reference, tokenizer) == "<s>fgh"


def test_example_ids_are_unique_and_stable(tokenizer, write_rows, make_config):
    other = {"prompt": "x", "ground_truth": "y"}
    first, report = load(make_config(write_rows([GOOD, GOOD])), tokenizer)
    second, _ = load(make_config(write_rows([other, GOOD, GOOD])), tokenizer)
    assert [reference.example_id for reference in first] == [reference.example_id for reference in second[1:]]
    assert len({reference.example_id for reference in second}) == 3
    assert "1 rows repeat an earlier one" in report.summary()


def many(count, start=0):
    return [{"prompt": f"a{number}", "ground_truth": f"b{number}"} for number in range(start, start + count)]


def test_split_by_content_is_stable_when_rows_are_added(tokenizer, write_rows, make_config):
    small = load_data(make_config(write_rows(many(300)), heldout_fraction=0.2), tokenizer)
    grown = many(300, 300) + many(300)[::-1]
    large = load_data(make_config(write_rows(grown), heldout_fraction=0.2), tokenizer)
    wider = load_data(make_config(write_rows(many(300)), heldout_fraction=0.4), tokenizer)
    ids = [[{reference.example_id for reference in side} for side in sides[:2]] for sides in (small, large, wider)]
    assert ids[0][0] <= ids[1][0] and ids[0][1] <= ids[1][1]
    assert ids[0][1] < ids[2][1]
    assert not ids[1][0] & ids[1][1]
    assert 30 <= len(ids[0][1]) <= 90  # 60 expected, standard deviation 7


def test_copies_of_a_row_land_on_one_side(tokenizer, write_rows, make_config):
    rows = many(40)
    train, heldout, _ = load_data(make_config(write_rows(rows * 3), heldout_fraction=0.3), tokenizer)
    assert heldout
    contents = [{tuple(reference.token_ids.tolist()) for reference in side} for side in (train, heldout)]
    assert not contents[0] & contents[1]
    assert len(train) == 3 * len(contents[0])


def test_no_held_out_row_is_said(tokenizer, write_rows, make_config):
    _, heldout, report = load_data(make_config(write_rows([GOOD]), heldout_fraction=1e-9), tokenizer)
    assert heldout == []
    assert "no row is held out" in report.summary()


def test_everything_held_out_is_an_error(tokenizer, write_rows, make_config):
    with pytest.raises(DataError, match="all 1 usable rows are held out"):
        load_data(make_config(write_rows([GOOD]), heldout_fraction=1.0), tokenizer)
