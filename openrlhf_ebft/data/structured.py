"""Pairs of text to references with one anchor, at the end of the prompt (algorithms.md, section 1)."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config.sections import DataConfig, RolloutConfig
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.data.examples import Example, RowFault


def completion_limit(ground_truth_tokens: int, config: RolloutConfig) -> int:
    """Returns the limit of a completion in tokens: a multiple of its ground truth's length, between two bounds."""
    # Exact arithmetic: in floating point 1.1 * 50 is above 55 and would round up to 56.
    multiple = math.ceil(Fraction(str(config.length_multiplier)) * ground_truth_tokens)
    return min(max(multiple, config.min_length_limit), config.max_new_tokens)


class PromptTokenizer:
    """Token ids of prompts and ground truths, each on its own, so that a prompt's ids do not depend on its answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_eos: bool) -> None:
        self._tokenizer = tokenizer
        self._append_eos = append_eos
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
        self._adds_bos = self._bos is not None and with_special[0] == self._bos

    def prompt_ids(self, example: Example) -> list[int]:
        """Returns the prompt's ids; BOS comes first when the tokenizer adds one and no template wrote the prompt.

        Raises:
            RowFault: BOS would stand twice.
        """
        ids: list[int] = self._tokenizer(example.prompt, add_special_tokens=False, verbose=False)["input_ids"]
        if self._adds_bos and not example.is_templated:
            ids = [self._bos, *ids]
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            token = self._tokenizer.bos_token
            cause = "the chat template writes it" if example.is_templated else "the tokenizer adds it"
            raise RowFault(
                "duplicate BOS", f"the prompt begins with {token!r} twice: {cause}, and the text has it too; remove one"
            )
        if not ids:
            raise RowFault("empty prompt", "the prompt has no tokens")
        return ids

    def ground_truth_ids(self, example: Example) -> list[int]:
        """Returns the ground truth's ids, ended by exactly one EOS when EOS is appended.

        Raises:
            RowFault: an EOS before the end, after which no completion could follow the ground truth.
        """
        ids: list[int] = self._tokenizer(example.ground_truth, add_special_tokens=False, verbose=False)["input_ids"]
        if self._append_eos and ids[-1:] != [self._eos]:
            ids = [*ids, self._eos]
        if self._eos in ids[:-1]:
            token = self._tokenizer.eos_token
            raise RowFault(
                "EOS inside", f"the ground truth holds {token!r} before its end, at token {ids.index(self._eos)}"
            )
        return ids

    def document_ids(self, text: str) -> list[int]:
        """Returns a raw document's ids, with BOS when the tokenizer adds one and EOS when it is appended."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
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


def make_reference(example_id: str, prompt: list[int], ground_truth: list[int], config: RolloutConfig) -> Reference:
    """Returns prompt + ground truth as one reference, whose one anchor's window is the whole ground truth."""
    prompt_length, window = len(prompt), len(ground_truth)
    return Reference(
        example_id=example_id,
        token_ids=torch.tensor([*prompt, *ground_truth], dtype=torch.int64),
        anchors=torch.tensor([prompt_length], dtype=torch.int64),
        window_lengths=torch.tensor([window], dtype=torch.int64),
        max_new_tokens=torch.tensor([completion_limit(window, config)], dtype=torch.int64),
        loss_mask=torch.arange(prompt_length + window) >= prompt_length,
    )


def fit_lengths(prompt: list[int], ground_truth: list[int], config: DataConfig) -> RowFault | None:
    """Returns why a row's lengths put it outside the configured limits, None when they do not."""
    if len(prompt) > config.max_prompt_tokens:
        detail = f"prompt of {len(prompt)} tokens, above data.max_prompt_tokens = {config.max_prompt_tokens}"
        return RowFault("over-long prompt", detail)
    if len(ground_truth) < config.min_ground_truth_tokens:
        limit = f"below data.min_ground_truth_tokens = {config.min_ground_truth_tokens}"
        return RowFault("short ground truth", f"ground truth of {len(ground_truth)} tokens, {limit}")
    if len(ground_truth) > config.max_ground_truth_tokens:
        limit = f"above data.max_ground_truth_tokens = {config.max_ground_truth_tokens}"
        return RowFault("long ground truth", f"ground truth of {len(ground_truth)} tokens, {limit}")
    return None
