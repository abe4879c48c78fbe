"""Chats with several assistant turns: every one an anchor of the same reference, behind the turns that were given."""

import json

import pytest
import torch

from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.load import load_data
from tests.tiny_models import EOS_ID, tiny_byte_tokenizer

CLOSED = (  # as ChatML does: EOS right behind the content
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OWN_END = CLOSED.replace("{{ eos_token }}", "<unk>")
TRIMMED = CLOSED.replace("m['content']", "m['content'] | trim")
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
    {"role": "tool", "content": "42"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "it is 42"},
]


@pytest.fixture(scope="module")
def closed_tokenizer(tmp_path_factory):
    return tiny_byte_tokenizer(tmp_path_factory.mktemp("closed"), chat_template=CLOSED)


@pytest.fixture
def load(write_rows, make_config):
    def make(tokenizer, chats, model="m", **data):
        path = write_rows([{"chat": chat} for chat in chats])
        config = make_config(path, **{"messages_column": "chat", "turns": "all", **data})
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
        train, _, report = load_data(config, tokenizer)
        for reference in train:
            RolloutTree.without_branches(reference)  # checks anchors, windows and masks
        return train, report

    return make


def texts(reference, tokenizer):
    """(context, window) of every anchor."""
    ids = reference.token_ids
    pairs = zip(reference.anchors.tolist(), reference.window_lengths.tolist(), strict=True)
    return [(tokenizer.decode(ids[:a]), tokenizer.decode(ids[a : a + w])) for a, w in pairs]


def test_every_turn_continues_what_the_template_writes_before_it(load, closed_tokenizer):
    (reference,), report = load(closed_tokenizer, [CHAT])
    expected = [
        closed_tokenizer.apply_chat_template(CHAT[:i], tokenize=False, add_generation_prompt=True) for i in (2, 4, 7)
    ]
    answers = ["hello you<eos>", "no<eos>", "it is 42<eos>"]
    assert texts(reference, closed_tokenizer) == list(zip(expected, answers, strict=True))
    whole = closed_tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert reference.token_ids.tolist() == whole[:-1], (
        "the ids of the whole chat, without the line end behind the last EOS"
    )
    windows = torch.zeros(len(reference.token_ids), dtype=torch.bool)
    for anchor, length in zip(reference.anchors, reference.window_lengths, strict=True):
        windows[anchor : anchor + length] = True
    assert torch.equal(reference.loss_mask, windows)
    assert reference.max_new_tokens.tolist() == [9, 8, 14]  # 1.5 times 6, 3 and 9, at least 8
    assert report.changed == {}
    assert "training: 1 chats, 3 assistant turns" in report.summary()


def test_the_last_turn_is_the_same_with_and_without_the_others(load, closed_tokenizer):
    (every,), _ = load(closed_tokenizer, [CHAT])
    (last,), _ = load(closed_tokenizer, [CHAT], turns="last")
    assert every.example_id == last.example_id, "rows stay on their side when data.turns changes"
    assert torch.equal(every.token_ids, last.token_ids)
    assert (every.anchors[-1], every.max_new_tokens[-1]) == (last.anchors[0], last.max_new_tokens[0])


def test_a_template_that_writes_something_before_eos_keeps_it_in_the_prompt(load, chat_tokenizer):
    (reference,), _ = load(chat_tokenizer, [CHAT])
    windows = [window for _, window in texts(reference, chat_tokenizer)]
    assert windows == ["hello you", "no", "it is 42<eos>"]
    assert texts(reference, chat_tokenizer)[1][0].endswith("hello you\n<eos>user: more\nassistant: ")
    without, _ = load(chat_tokenizer, [CHAT], append_eos=False)
    assert [window for _, window in texts(without[0], chat_tokenizer)] == ["hello you", "no", "it is 42"]


@pytest.mark.parametrize(
    ("stops", "windows"),
    [
        ([EOS_ID, 2], ["hello you<unk>", "no<unk>", "it is 42<unk>"]),
        ([EOS_ID], ["hello you", "no", "it is 42<eos>"]),  # nobody would stop at <unk>
    ],
)
def test_turns_end_as_the_template_ends_them_where_completions_do(load, tmp_path, stops, windows):
    """Case B05's kind: a chat model's end of turn is often another token than its tokenizer's EOS."""
    tokenizer = tiny_byte_tokenizer(tmp_path, chat_template=OWN_END)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (reference,), _ = load(tokenizer, [CHAT], model=tmp_path)
    assert [window for _, window in texts(reference, tokenizer)] == windows
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)[:-1]
    assert reference.token_ids[:-1].tolist() == whole[:-1]
    assert reference.closings.tolist() == [len(stops) - 1] * 2 + [1]
    (last,), _ = load(tokenizer, [CHAT], model=tmp_path, turns="last")
    assert torch.equal(last.token_ids, reference.token_ids)
    (bare,), _ = load(tokenizer, [CHAT], model=tmp_path, append_eos=False)
    assert [window for _, window in texts(bare, tokenizer)] == ["hello you", "no", "it is 42"]
    chat = [*CHAT[:2], {"role": "assistant", "content": "a<unk>b"}]
    if len(stops) == 2:
        with pytest.raises(DataError, match="holds '<unk>' before its end, at token 1"):
            load(tokenizer, [chat], model=tmp_path)


def test_without_eos_the_windows_are_the_contents_alone(load, closed_tokenizer):
    (reference,), _ = load(closed_tokenizer, [CHAT], append_eos=False)
    assert [window for _, window in texts(reference, closed_tokenizer)] == ["hello you", "no", "it is 42"]
    assert EOS_ID in reference.token_ids.tolist(), "the template still closes the turns of the history"


def test_turns_outside_the_limits_stay_in_the_history(load, closed_tokenizer):
    (reference,), report = load(closed_tokenizer, [CHAT], min_ground_truth_tokens=5)
    (every,), _ = load(closed_tokenizer, [CHAT])
    assert torch.equal(reference.token_ids, every.token_ids)
    assert reference.anchors.tolist() == every.anchors[[0, 2]].tolist()
    assert not bool(reference.loss_mask[every.anchors[1]])
    assert report.changed == {"turns left out": 1}
    assert "1 of 3 assistant turns have no anchor, first: ground truth of 3 tokens" in report.summary()


def test_a_long_chat_keeps_the_turns_whose_prompt_fits(load, closed_tokenizer):
    (every,), _ = load(closed_tokenizer, [CHAT])
    limit = int(every.anchors[1])
    (reference,), report = load(closed_tokenizer, [CHAT], max_prompt_tokens=limit)
    assert reference.anchors.tolist() == every.anchors[:2].tolist()
    assert len(reference.token_ids) == limit + int(every.window_lengths[1])
    assert report.changed == {"turns left out": 1}
    with pytest.raises(
        DataError, match=rf"prompt of {int(every.anchors[2])} tokens, above .* = {limit} .*= skip goes on"
    ):
        load(closed_tokenizer, [CHAT], max_prompt_tokens=limit, over_long_prompt="error")
    with pytest.raises(DataError, match=r"no row can be used[\s\S]*1 x over-long prompt"):
        load(closed_tokenizer, [CHAT], max_prompt_tokens=5)


def test_a_first_message_of_the_assistant_is_history(load, closed_tokenizer):
    (reference,), _ = load(closed_tokenizer, [CHAT[2:5]])
    assert texts(reference, closed_tokenizer) == [("<assistant>hello you<eos>\n<user>more\n<assistant>", "no<eos>")]


def test_a_template_that_rewrites_history_is_named(load, tmp_path):
    trimming = tiny_byte_tokenizer(tmp_path, chat_template=TRIMMED)
    chat = [*CHAT[:2], {"role": "assistant", "content": "hello "}, *CHAT[3:5]]
    with pytest.raises(DataError, match=r"before message 5 of column 'chat' differently .* set data.turns to last"):
        load(trimming, [chat])
    (reference,), _ = load(trimming, [chat], turns="last")
    assert reference.anchors.numel() == 1
    _, report = load(trimming, [chat, CHAT], on_bad_row="skip")
    assert report.skipped == {"rewritten by the chat template": 1}


def test_an_empty_turn_is_named(load, closed_tokenizer):
    chat = [*CHAT[:2], {"role": "assistant", "content": " "}, *CHAT[3:5]]
    with pytest.raises(DataError, match="message 3 of 'chat' is empty"):
        load(closed_tokenizer, [chat])


def test_strided_anchors_in_every_answer(load, closed_tokenizer):
    """An anchor's window lies in one answer; its context is the whole chat before it."""
    strided = {"mode": "strided", "stride": 3, "context_length": 4, "generate_max_len": 3, "sequence_length": 256}
    (reference,), _ = load(closed_tokenizer, [CHAT], **strided)
    (turns,), _ = load(closed_tokenizer, [CHAT])
    expected = []
    for start, length in zip(turns.anchors.tolist(), turns.window_lengths.tolist(), strict=True):
        expected += range(start, start + length - 3 + 1, 3)
    assert reference.anchors.tolist() == expected
    assert torch.equal(reference.token_ids, turns.token_ids)
    assert torch.equal(reference.loss_mask, turns.loss_mask)
    later, _ = load(closed_tokenizer, [CHAT], **strided, min_completion_prefix=2)
    first, _, third = turns.anchors.tolist()
    assert later[0].anchors.tolist() == [first + 2, third + 2, third + 5]
