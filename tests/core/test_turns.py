"""Chats on the policy's own answers: contexts, closings, lengths, written out by hand."""

from dataclasses import replace

import pytest
import torch

from openrlhf_ebft.core.experience import Completion, Reference
from openrlhf_ebft.core.turns import first_turn, longest_own_history, own_history_reference

EOS = 1
#        prompt 0  | turn 0      | prompt 1 | turn 1   | prompt 2 | turn 2
TOKENS = [30, 31, 32, 40, 41, EOS, 33, 34, 42, EOS, 35, 43, 44, 45]


def chat(closings=(1, 1, 0)):
    return Reference(
        example_id="c",
        token_ids=torch.tensor(TOKENS),
        anchors=torch.tensor([3, 8, 11]),
        window_lengths=torch.tensor([3, 2, 3]),
        max_new_tokens=torch.tensor([5, 8, 4]),
        loss_mask=torch.tensor([False] * 3 + [True] * 3 + [False] * 2 + [True] * 2 + [False] + [True] * 3),
        closings=None if closings is None else torch.tensor(closings),
    )


def answer(tokens, reason="stop"):
    return Completion(tuple(tokens), (-1.0,) * len(tokens), reason)


def test_the_first_turn_stands_behind_the_data():
    turn = own_history_reference(chat(), [])
    turn.check()
    assert turn.example_id == "c/turn-0" == first_turn(chat())
    assert turn.token_ids.tolist() == TOKENS[:6]
    assert (turn.anchors.tolist(), turn.window_lengths.tolist(), turn.max_new_tokens.tolist()) == ([3], [3], [5])
    assert turn.loss_mask.tolist() == [False] * 3 + [True] * 3


def test_later_turns_stand_behind_the_policys_answers():
    """A stop token goes, whichever it was; what closes the ground truth comes, also behind an answer cut off."""
    turn = own_history_reference(chat(), [answer([50, 51, 52, 2])])
    assert turn.token_ids.tolist() == [30, 31, 32, 50, 51, 52, EOS, 33, 34, 42, EOS]
    assert (turn.anchors.tolist(), turn.window_lengths.tolist(), turn.max_new_tokens.tolist()) == ([9], [2], [8])
    turn = own_history_reference(chat(), [answer([50, 51], "length"), answer([EOS])])
    assert turn.example_id == "c/turn-2"
    assert turn.token_ids.tolist() == [30, 31, 32, 50, 51, EOS, 33, 34, EOS, 35, 43, 44, 45]
    turn.check()


@pytest.mark.parametrize("closings", [None, (0, 0, 0)])
def test_a_template_that_closes_turns_itself(closings):
    """The closing stands in the next prompt then."""
    turn = own_history_reference(chat(closings), [answer([50, EOS])])
    assert turn.token_ids.tolist() == [30, 31, 32, 50, 33, 34, 42, EOS]


def test_the_datas_own_answers_give_the_datas_own_contexts():
    reference = chat()
    given = [answer([40, 41, EOS]), answer([42, EOS])]
    for turn in range(3):
        made = own_history_reference(reference, given[:turn])
        stop = int(reference.anchors[turn] + reference.window_lengths[turn])
        assert made.token_ids.tolist() == TOKENS[:stop]
        assert made.anchors[0] == reference.anchors[turn]


def test_longest_sequence():
    """Prompts 3 + 2 + 1, answers of 5 and 8 with one closing token each, a last completion of 4."""
    assert longest_own_history(chat()) == 6 + 6 + 9 + 4
    worst = own_history_reference(chat(), [answer([9] * 5, "length"), answer([9] * 8, "length")])
    assert int(worst.anchors[0] + worst.max_new_tokens[0]) == longest_own_history(chat())


def test_longest_sequence_may_end_with_the_ground_truth_of_a_middle_turn():
    """A window above its completions' limit, behind a first answer as long as may be: 3 + 5 + 1, 2, 40."""
    tokens = torch.tensor([*TOKENS[:8], *range(60, 99), EOS, *TOKENS[10:]])
    windows = torch.tensor([3, 40, 3])
    long = replace(
        chat(), token_ids=tokens, window_lengths=windows, anchors=torch.tensor([3, 8, 49]), loss_mask=tokens > 0
    )
    worst = own_history_reference(long, [answer([9] * 5, "length")])
    assert longest_own_history(long) == worst.token_ids.numel() == 9 + 2 + 40


def test_more_answers_than_turns_are_refused():
    with pytest.raises(ValueError, match="c: 3 answers, but the chat has only 3 turns"):
        own_history_reference(chat(), [answer([5])] * 3)
