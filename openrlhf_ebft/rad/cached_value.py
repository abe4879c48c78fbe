"""Scores of prefix + candidate with the reward model's keys and values kept across steps.

The prefix of a row is held once. The K candidates of a step go through in one forward with a tree mask, all at the
position right after the prefix; the entry of the one that is chosen becomes part of the prefix, so an ordinary step
costs K reward-model tokens and nothing is computed twice (arXiv 2310.09520, section 2.2).
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch

from openrlhf_ebft.rad.prefixes import check_known_ids, compact_prefix
from openrlhf_ebft.rad.reward_model_value import RewardModelValue, backbone_of, position_head
from openrlhf_ebft.rad.tree_attention import NAME as TREE_ATTENTION
from openrlhf_ebft.rad.tree_cache import TreeCache
from openrlhf_ebft.rad.tree_inputs import AttentionWindows, TreeInputs, build_inputs
from openrlhf_ebft.rad.tree_state import Reuse, TreeState, match_rows, reused_slots
from openrlhf_ebft.rad.values import BaseCandidateValue, StepContext, extract_score


class CachedRewardModelValue(BaseCandidateValue):
    """The scores of :class:`RewardModelValue` (token ids, same rules), at K reward-model tokens a step.

    Reuse is decided by token content alone, so left padding, beams, repeated or dropped rows, rewinds, another prompt
    and interleaved callers all give the scores of a fresh forward pass. One instance serves one caller at a time (a
    lock keeps threads apart, at the price of recomputing when they alternate); `for_call()` gives each its own memory.
    A prefix longer than the reward model reads is cut to its last tokens; from then on every step moves all positions
    and recomputes the window.

    Args:
        reward_model: decoder-only sequence classifier with a `score` head, eval mode. If it attends with `sdpa`, it
            is switched to the package's `rad_tree`, which is `sdpa` in every forward but those of this value.
        rm_tokenizer: its tokenizer, read for its length limit only.
        score_index, score_transform: as in :class:`RewardModelValue`.
        max_length: tokens the reward model may read; default: what it and its tokenizer state.
        verify: compare every score with a full forward pass; a difference is a RuntimeError.

    Raises:
        ValueError: the model has no head that reads every position, or layers that keep no keys and values.
    """

    def __init__(
        self,
        reward_model: Any,
        rm_tokenizer: Any = None,
        *,
        score_index: int = 0,
        score_transform: str = "none",
        max_length: int | None = None,
        verify: bool = False,
    ) -> None:
        if position_head(reward_model) is None:
            raise ValueError("it is not decoder-only (no score head that reads every position)")
        self._stateless = RewardModelValue(
            reward_model, rm_tokenizer, score_index=score_index, score_transform=score_transform, max_length=max_length
        )
        self.reward_model = reward_model
        self.verify = verify
        self.max_length = self._stateless.max_length
        self.vocab_limit = self._stateless.vocab_limit
        self._config = reward_model.config.get_text_config()
        self._windows = AttentionWindows(self._config)
        if self._config._attn_implementation == "sdpa":
            reward_model.set_attn_implementation(TREE_ATTENTION)
        self.tokens_forwarded = 0
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._state: TreeState | None = None
        self._cache: TreeCache | None = None

    def for_call(self) -> CachedRewardModelValue:
        """A copy with its own (empty) memory, sharing the reward model."""
        clone = copy.copy(self)
        clone.tokens_forwarded = 0
        clone._forget()
        return clone

    def cleanup(self) -> None:
        self._forget()
        self._stateless.cleanup()
        self.reward_model = None

    def score(self, ctx: StepContext) -> torch.Tensor:
        """Scores [B, K], float32, on the device of `ctx.candidate_ids`.

        Raises:
            ValueError: an id that the reward model has no embedding for.
            RuntimeError: `verify` found a difference; the message names the prefix length and both scores.
        """
        if self.reward_model is None:
            raise RuntimeError("this value was cleaned up; build a new one or call RAD.steer() again")
        device = next(self.reward_model.parameters()).device
        keep = None if self.max_length is None else self.max_length - 1
        tokens, lengths = compact_prefix(ctx.prefix_ids.to(device), ctx.real_tokens().to(device), keep)
        candidate_ids = ctx.candidate_ids.to(device)
        check_known_ids(tokens, self.vocab_limit, "the prefix")
        check_known_ids(candidate_ids, self.vocab_limit, "the candidate set")
        with self._lock, torch.inference_mode():
            try:
                scores = self._score_step(tokens, lengths, candidate_ids)
            except BaseException:
                # A forward that stopped half way leaves entries of two steps behind.
                self._state = self._cache = None
                raise
        if self.verify:
            self._check(ctx, scores)
        return scores.to(ctx.candidate_ids.device)

    def _score_step(self, tokens: torch.Tensor, lengths: torch.Tensor, candidate_ids: torch.Tensor) -> torch.Tensor:
        valid, covered = self._reuse(tokens, lengths)
        dtype = next(self.reward_model.parameters()).dtype
        inputs = build_inputs(tokens, lengths, candidate_ids, valid, covered, self._windows, dtype)
        hidden = self._forward(inputs)
        committed = torch.cat([valid, inputs.new_valid], dim=1)
        self._cache.set_start(committed.size(1))
        self._state = TreeState(tokens, lengths, candidate_ids, committed)
        logits = position_head(self.reward_model)(hidden[:, inputs.new_valid.size(1) :])
        return extract_score(logits, self._stateless.score_index, self._stateless.score_transform)

    def _reuse(self, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring the cache to the rows of this step; returns valid slots [B, P] and the tokens [B] they cover."""
        state = self._state
        if state is None or tokens.size(0) == 0:
            return self._start_again(lengths)
        reuse = match_rows(state, tokens, lengths)
        if reuse.continues(state):
            return self._go_on(state, reuse)
        if int(reuse.covered.max()) == 0:
            return self._start_again(lengths)
        slots, valid = reused_slots(state, reuse)
        self._cache.take(reuse.source, slots)
        self._cache.set_start(slots.size(1))
        return valid, reuse.covered

    def _start_again(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache = TreeCache(self._config.num_hidden_layers)
        return lengths.new_zeros(lengths.size(0), 0, dtype=torch.bool), torch.zeros_like(lengths)

    def _go_on(self, state: TreeState, reuse: Reuse) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows are those of the last step: only the chosen candidates' entries move, into the next slot."""
        valid = state.valid
        if not bool((reuse.candidate >= 0).all()):
            # Some row's next token was no candidate (padding of a finished row): one new token for every row instead.
            return valid, reuse.without_candidates().covered
        self._cache.copy_slot(valid.size(1) + reuse.candidate, valid.size(1))
        self._cache.set_start(valid.size(1) + 1)
        return torch.cat([valid, valid.new_ones(valid.size(0), 1)], dim=1), reuse.covered

    def _forward(self, inputs: TreeInputs) -> torch.Tensor:
        """Hidden states [B, M + K, H] of the new tokens and the candidates; their entries land in the cache."""
        self.tokens_forwarded += inputs.input_ids.numel()
        output = backbone_of(self.reward_model)(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def _check(self, ctx: StepContext, scores: torch.Tensor) -> None:
        full = self._stateless.score(ctx).to(scores)
        worst = score_difference(scores, full)
        limit = score_tolerance(next(self.reward_model.parameters()).dtype)
        if worst > limit:
            raise RuntimeError(
                f"cached scores differ from a full forward by {worst:.3g} (limit {limit:.3g}) at a prefix of "
                f"{ctx.prefix_ids.size(1)} tokens: cached {scores.tolist()}, full {full.tolist()}"
            )


def score_difference(scores: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest |difference|, relative to the reference where that exceeds 1; NaN on one side only counts as inf."""
    if bool((scores.isnan() != reference.isnan()).any()):
        return float("inf")
    gap = (scores - reference).abs() / reference.abs().clamp_min(1)
    return float(gap.nan_to_num(0).max()) if gap.numel() else 0.0


def score_tolerance(dtype: torch.dtype) -> float:
    """What two correct computations of one score may differ by: 1e-5 in float32, 16 rounding steps below it."""
    return 1e-5 if torch.finfo(dtype).bits >= 32 else 16 * torch.finfo(dtype).eps
