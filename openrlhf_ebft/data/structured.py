"""Turns of text to references with an anchor at the end of each prompt (algorithms.md, section 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config.sections import DataConfig, RolloutConfig
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.data.errors import RowFault
from openrlhf_ebft.data.examples import Example


@dataclass(frozen=True)
class TurnIds:
    """Token ids of a `Turn`."""

    prompt: list[int]
    ground_truth: list[int]
    closing: int = 0  # tokens at the end of the ground truth that were added to close it


def completion_limit(ground_truth_tokens: int, config: RolloutConfig) -> int:
    """Returns the limit of a completion in tokens: a multiple of its ground truth's length, between two bounds."""
    # Exact arithmetic: in floating point 1.1 * 50 is above 55 and would round up to 56.
    multiple = math.ceil(Fraction(str(config.length_multiplier)) * ground_truth_tokens)
    return min(max(multiple, config.min_length_limit), config.max_new_tokens)


class PromptTokenizer:
    """Token ids of prompts and ground truths, each on its own, so that a prompt's ids do not depend on its answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_eos: bool, turn_end: int | None = None) -> None:
        """`turn_end`: id of the token that closes the turns of templated chats; EOS when None."""
        self._tokenizer = tokenizer
        self._append_eos = append_eos
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._turn_end = self._eos if turn_end is None else turn_end
        with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
        self._adds_bos = self._bos is not None and with_special[0] == self._bos

    def turn_ids(self, example: Example) -> list[TurnIds]:
        """Returns the ids of every turn, each text on its own.

        A ground truth ends with EOS, that of a templated chat with the end of its turn, when EOS is appended. In front
        of a later turn it does where the chat template closes it so: the token is then the window's, not the next
        prompt's.

        Raises:
            RowFault: see `_first_prompt` and `_ground_truth`.
        """
        end = self._turn_end if example.is_templated else self._eos
        turns: list[TurnIds] = []
        for number, turn in enumerate(example.turns):
            prompt = self._plain(turn.prompt) if number else self._first_prompt(turn.prompt, example.is_templated)
            if turns and self._append_eos and prompt[:1] == [end] and not self._is_ended(turns[-1], end):
                turns[-1] = TurnIds(turns[-1].prompt, [*turns[-1].ground_truth, end], closing=1)
                prompt = prompt[1:]
            turns.append(TurnIds(prompt, self._ground_truth(turn.ground_truth, end)))
        last = turns[-1]
        if self._append_eos and not self._is_ended(last, end):
            turns[-1] = TurnIds(last.prompt, [*last.ground_truth, end], closing=1)
        return turns

    def _is_ended(self, turn: TurnIds, end: int) -> bool:
        return turn.ground_truth[-1:] in ([self._eos], [end])

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _first_prompt(self, text: str, is_templated: bool) -> list[int]:
        """BOS comes first when the tokenizer adds one and no template wrote the prompt; RowFault if it stands twice."""
        ids = self._plain(text)
        if self._adds_bos and not is_templated:
            ids = [self._bos, *ids]
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            token = self._tokenizer.bos_token
            cause = "the chat template writes it" if is_templated else "the tokenizer adds it"
            raise RowFault(
                "duplicate BOS", f"the prompt begins with {token!r} twice: {cause}, and the text has it too; remove one"
            )
        if not ids:
            raise RowFault("empty prompt", "the prompt has no tokens")
        return ids

    def _ground_truth(self, text: str, end: int) -> list[int]:
        """RowFault for EOS or the turn's `end` before the end: no completion could follow the ground truth after it."""
        ids = self._plain(text)
        place = next((place for place, token in enumerate(ids[:-1]) if token in (self._eos, end)), None)
        if place is not None:
            token = self._tokenizer.convert_ids_to_tokens(ids[place])
            raise RowFault("EOS inside", f"the ground truth holds {token!r} before its end, at token {place}")
        return ids

    def document_ids(self, text: str) -> list[int]:
        """Returns a raw document's ids, with BOS when the tokenizer adds one and EOS when it is appended."""
        ids = self._plain(text)
        if self._adds_bos and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        if self._append_eos and ids[-1:] != [self._eos]:
            ids = [*ids, self._eos]
        return ids

    def truncate_left(self, ids: list[int], limit: int) -> list[int]:
        """Returns the last `limit` prompt ids; a BOS at the front stays."""
        if self._bos is not None and ids[0] == self._bos and limit > 1:
            return [self._bos, *ids[len(ids) - limit + 1 :]]
        return ids[len(ids) - limit :]


def make_reference(
    example_id: str, turns: Sequence[TurnIds], config: RolloutConfig, columns: Mapping[str, Any]
) -> Reference:
    """Returns all turns as one reference: an anchor at the end of each prompt, whose window is the ground truth.

    `columns` are what the reference carries of its row.
    """
    anchors, windows = [], []
    ids: list[int] = []
    mask: list[bool] = []
    for turn in turns:
        ids += turn.prompt
        anchors.append(len(ids))
        windows.append(len(turn.ground_truth))
        ids += turn.ground_truth
        mask += [False] * len(turn.prompt) + [True] * len(turn.ground_truth)
    return Reference(
        example_id=example_id,
        token_ids=torch.tensor(ids, dtype=torch.int64),
        anchors=torch.tensor(anchors, dtype=torch.int64),
        window_lengths=torch.tensor(windows, dtype=torch.int64),
        max_new_tokens=torch.tensor([completion_limit(window, config) for window in windows], dtype=torch.int64),
        loss_mask=torch.tensor(mask),
        closings=torch.tensor([turn.closing for turn in turns], dtype=torch.int64),
        columns=(columns,) if columns else (),
    )


def fit_turns(turns: Sequence[TurnIds], config: DataConfig) -> tuple[list[TurnIds], list[RowFault]]:
    """Returns the turns whose lengths lie within the configured limits, and why the others do not.

    A ground truth outside the limits stays in the prompt of the turns behind it. The prompt of a turn is all that
    stands before it.
    """
    kept: list[TurnIds] = []
    misfits: list[RowFault] = []
    length = 0
    waiting: list[int] = []  # turns that were left out since the last kept one
    for turn in turns:
        length += len(turn.prompt)
        misfit = _misfit(length, len(turn.ground_truth), config)
        length += len(turn.ground_truth)
        prompt = [*waiting, *turn.prompt]
        if misfit is None:
            kept.append(replace(turn, prompt=prompt))
            waiting = []
        else:
            misfits.append(misfit)
            waiting = [*prompt, *turn.ground_truth]
    return kept, misfits


def _misfit(prompt: int, ground_truth: int, config: DataConfig) -> RowFault | None:
    if prompt > config.max_prompt_tokens:
        detail = f"prompt of {prompt} tokens, above data.max_prompt_tokens = {config.max_prompt_tokens}"
        return RowFault("over-long prompt", detail)
    if ground_truth < config.min_ground_truth_tokens:
        limit = f"below data.min_ground_truth_tokens = {config.min_ground_truth_tokens}"
        return RowFault("short ground truth", f"ground truth of {ground_truth} tokens, {limit}")
    if ground_truth > config.max_ground_truth_tokens:
        limit = f"above data.max_ground_truth_tokens = {config.max_ground_truth_tokens}"
        return RowFault("long ground truth", f"ground truth of {ground_truth} tokens, {limit}")
    return None
