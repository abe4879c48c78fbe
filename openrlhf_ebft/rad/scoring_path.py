"""Which way a reward model can be scored: cached, stateless on token ids, or through text."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from openrlhf_ebft.rad.cached_value import CachedRewardModelValue, score_difference, score_tolerance
from openrlhf_ebft.rad.reward_model_value import RewardModelValue
from openrlhf_ebft.rad.values import BaseCandidateValue, StepContext

PATHS = ("cached", "stateless", "text")
# What a model raises when it cannot take a mask, positions or a cache of this kind.
FORWARD_FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)


def same_vocabulary(lm_tokenizer: Any, rm_tokenizer: Any) -> bool:
    """Whether both tokenizers give every token the same id. Without any tokenizer there are only ids: they are shared.

    Raises:
        ValueError: only one of the two is known.
    """
    if lm_tokenizer is rm_tokenizer:
        return True
    if lm_tokenizer is None:
        raise ValueError("steer() needs the language model's tokenizer to compare vocabularies: pass tokenizer=")
    if rm_tokenizer is None:
        raise ValueError("the reward model's folder holds no tokenizer to compare vocabularies: save it there")
    return lm_tokenizer.get_vocab() == rm_tokenizer.get_vocab()


def resolve_value(
    reward_model: PreTrainedModel,
    rm_tokenizer: Any,
    lm_tokenizer: Any,
    *,
    score_index: int,
    score_transform: str,
    efficient: bool,
    verify: bool = False,
) -> tuple[BaseCandidateValue, str]:
    """The fastest value that gives the right scores, and the name of its path.

    Returns:
        the value and one of PATHS: `cached` and `stateless` score token ids, `text` decodes and encodes them again.

    Warns:
        UserWarning: once, when `efficient` is asked but the cached path is impossible; it names the reason.
    """
    reading = {"score_index": score_index, "score_transform": score_transform}
    if not same_vocabulary(lm_tokenizer, rm_tokenizer):
        if efficient:
            _warn("its vocabulary differs from the language model's", "text")
        return RewardModelValue(reward_model, rm_tokenizer, shared_vocab=False, **reading), "text"
    stateless = RewardModelValue(reward_model, rm_tokenizer, **reading)
    if not efficient:
        return stateless, "stateless"
    try:
        cached = CachedRewardModelValue(reward_model, rm_tokenizer, verify=verify, **reading)
    except ValueError as reason:
        _warn(str(reason), "stateless")
        return stateless, "stateless"
    fault = cached_path_fault(cached, stateless)
    if fault is not None:
        _warn(fault, "stateless")
        return stateless, "stateless"
    return cached, "cached"


def _warn(reason: str, path: str) -> None:
    warnings.warn(
        f"RAD: the reward model cannot be scored with cached keys and values: {reason}; using the {path} path",
        UserWarning,
        stacklevel=4,
    )


def cached_path_fault(cached: CachedRewardModelValue, stateless: RewardModelValue) -> str | None:
    """Why the cached scores of this model are wrong, found by three short steps, or None when they are right.

    The steps have two rows of different length, candidates beside each other and one reused candidate, so a model
    that ignores the mask, the positions or the cache gives other scores than a full forward.
    """
    probe = cached.for_call()
    probe.verify = False
    # Wrong masks, positions or entries are off by far more; rounding of a deep model's random probe may exceed 1e-5.
    limit = 10 * score_tolerance(next(stateless.reward_model.parameters()).dtype)
    vocabulary = stateless.vocab_limit
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    candidates = torch.randint(0, vocabulary, (2, 3), generator=generator)
    ids[:, 5] = candidates[:, 1]
    for length in (5, 6, 7):
        if stateless.max_length is not None and length >= stateless.max_length:
            break
        step = StepContext(ids[:, :length], candidates, attention_mask=mask[:, :length])
        try:
            scores = probe.score(step)
        except FORWARD_FAULTS as fault:
            return f"a short cached forward failed ({type(fault).__name__}: {str(fault).splitlines()[0][:200]})"
        gap = score_difference(scores, stateless.score(step))
        if gap > limit:
            return f"a short cached forward gave scores {gap:.2g} away from a full one (limit {limit:.2g})"
    return None
