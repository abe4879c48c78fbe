"""A logits processor in four steps: select candidates, score them, normalise, shift."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any

import torch
from transformers import LogitsProcessor

from openrlhf_ebft.rad.candidates import check_policy, select_candidates
from openrlhf_ebft.rad.contenders import Contenders
from openrlhf_ebft.rad.prompt_mask import PromptMask
from openrlhf_ebft.rad.values import MOST_STRENGTH, BaseCandidateValue, CandidateValue, StepContext

NORMALIZATIONS = ("clamp", "minmax", "softmax", "none")
# Candidate values closer together than this count as equal for `minmax`.
_FLAT = 1e-8


@dataclass(frozen=True)
class ValueStepRecord:
    """One step of a processor, on the CPU; what a trace collects. B rows, K candidates.

    Attributes:
        prefix_length: tokens before this step, padding included.
        candidate_ids: [B, K] int64.
        candidate_scores: [B, K] scores that came in.
        values: [B, K] what the value returned.
        normalized: [B, K] after normalisation and inversion; beta times this was added.
        valid: [B, K] bool, False where a row has fewer candidates than K.
    """

    prefix_length: int
    candidate_ids: torch.Tensor
    candidate_scores: torch.Tensor
    values: torch.Tensor
    normalized: torch.Tensor
    valid: torch.Tensor


@dataclass(eq=False)
class ValueGuidedProcessor(LogitsProcessor):
    """Adds `beta * normalize(value)` to the candidates' scores and masks all other tokens.

    Memory between steps belongs to the value and is keyed on tokens, so the processor is a function of
    (prefix, scores): rewinds, reordered rows and another prompt are fine. Each processor takes its own copy of the
    value's memory, so two generate calls at the same time do not meet.

    Args:
        value: callable from :class:`StepContext` to [B, K].
        policy, k, p, max_candidates: see :func:`select_candidates`.
        beta: factor of the normalised values, logit units.
        normalize: `clamp` (to [0, 1], each value by itself), `minmax` (over the row's candidates; 0.5 when all are
            equal), `softmax` (over the row's candidates), `none`.
        invert: use 1 - value, after the normalisation.
        mask_non_candidates: set every other token to -inf (with `surviving` there is none to set).
        lm_tokenizer: handed to the value; its pad and end tokens are read when no mask is given.
        model: handed to the value.
        prompt_ids, attention_mask: [rows, P], the prompt and its mask; see :class:`PromptMask`.
        trace: list that receives one :class:`ValueStepRecord` per call, or None.
        best_only: the caller takes the best token of every row and looks at no other (greedy decoding, without
            penalties or other processors behind this one). Candidates that cannot win are then not scored and come out
            at -inf; the best token is the same. Only with `clamp`, whose bound is known; float32 scores; no trace.

    Raises:
        ValueError: unknown policy or normalisation, impossible k, p, beta or mask, `best_only` without `clamp`; at a
            step: a row without a candidate, a value of the wrong shape, NaN for a candidate, or infinite values that
            leave no number to add (the message names step, row and token). With `none`, -inf rules a candidate out.
    """

    value: CandidateValue
    _: KW_ONLY
    policy: str = "top_k"
    k: int | None = 20
    p: float | None = None
    beta: float = 1.0
    normalize: str = "none"
    invert: bool = False
    mask_non_candidates: bool = True
    max_candidates: int | None = None
    lm_tokenizer: Any = None
    model: Any = None
    prompt_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    trace: list[ValueStepRecord] | None = None
    best_only: bool = False

    def __post_init__(self) -> None:
        check_policy(self.policy, self.k, self.p, self.max_candidates)
        if self.normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {self.normalize!r}")
        if self.best_only and self.normalize != "clamp":
            raise ValueError(f"best_only needs normalize='clamp', which bounds the shift, not {self.normalize!r}")
        if not isinstance(self.beta, Real) or not abs(self.beta) <= MOST_STRENGTH:
            raise ValueError(f"beta must be a number of at most {MOST_STRENGTH:g} in size, got {self.beta!r}")
        self._contenders = Contenders(self.beta) if self.best_only and self.beta > 0 else None
        if isinstance(self.value, BaseCandidateValue):
            self.value = self.value.for_call()
        self._prompt_mask = PromptMask.for_tokenizer(self.lm_tokenizer, self.prompt_ids, self.attention_mask)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Shifted scores [B, V] from the prefix [B, T] int64 and the incoming scores [B, V]."""
        ids, valid = self._select(input_ids, scores)
        if self._contenders is not None and self.trace is None and scores.dtype == torch.float32:
            ids, valid, normalized = self._score_contenders(self._contenders, input_ids, scores, ids, valid)
            return self._shift(scores, ids, normalized, valid)
        values = self._score(input_ids, ids, valid)
        normalized = self._normalize(values, valid)
        if self.normalize != "clamp":
            self._check_infinite(input_ids, ids, values, normalized, valid)
        if self.trace is not None:
            self.trace.append(self._record(input_ids, scores, ids, values, normalized, valid))
        return self._shift(scores, ids, normalized, valid)

    def _select(self, input_ids: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        limit = self.value.vocab_limit if isinstance(self.value, BaseCandidateValue) else None
        ids, valid = select_candidates(
            scores[:, :limit], self.policy, k=self.k, p=self.p, max_candidates=self.max_candidates
        )
        some = valid.any(dim=1)
        if not bool(some.all()):
            lost = ~some & (scores != float("-inf")).any(dim=1)  # a row that came without any token leaves without any
            if bool(lost.any()):
                raise ValueError(
                    f"row {int(lost.nonzero()[0])} has no candidate at {self._step_name(input_ids)}: its best scores "
                    f"are NaN, or all its possible tokens lie beyond the first {limit} that the value can score"
                )
        return ids, valid

    def _normalize(self, values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        normalized = normalize_values(values, valid, self.normalize)
        return 1 - normalized if self.invert else normalized

    def _score_contenders(
        self,
        contenders: Contenders,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        ids: torch.Tensor,
        valid: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidates that may win, which of them are valid, and their normalised values: [B, K'] each."""
        incoming = scores.gather(1, ids)
        count = contenders.guess(incoming)
        values = self._score(input_ids, ids[:, :count], valid[:, :count])
        normalized = self._normalize(values, valid[:, :count])
        best = (incoming[:, :count] + self.beta * normalized).amax(1)
        needed = contenders.needed(incoming, best)
        if needed > count:
            rest = slice(count, needed)
            more = self._score(input_ids, ids[:, rest], valid[:, rest])
            normalized = torch.cat([normalized, self._normalize(more, valid[:, rest])], dim=1)
        scored = normalized.size(1)
        return ids[:, :scored], valid[:, :scored], normalized

    def _score(self, input_ids: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        context = StepContext(
            prefix_ids=input_ids,
            candidate_ids=ids,
            lm_tokenizer=self.lm_tokenizer,
            attention_mask=self._prompt_mask.for_prefix(input_ids),
            model=self.model,
        )
        values = self.value(context)
        if tuple(values.shape) != tuple(ids.shape):
            raise ValueError(
                f"the value must return one score per candidate, {tuple(ids.shape)}, got {tuple(values.shape)}"
            )
        values = values.to(device=ids.device, dtype=torch.float32)
        if where := self._first(values.isnan() & valid, input_ids, ids):
            raise ValueError(f"the reward is NaN at {where}; check the reward model's weights and precision")
        return values

    def _check_infinite(
        self,
        input_ids: torch.Tensor,
        ids: torch.Tensor,
        values: torch.Tensor,
        normalized: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        """A value of -inf may rule its token out; one from which no probability follows is an error."""
        shift = self._amounts(normalized)
        if where := self._first((shift.isnan() | (shift == float("inf"))) & valid, input_ids, ids):
            raise ValueError(
                f"the shift is infinite or NaN at {where}: the values go from {float(values.min())} to "
                f"{float(values.max())}, which normalize={self.normalize!r} and beta={self.beta} cannot use"
            )

    def _first(self, bad: torch.Tensor, input_ids: torch.Tensor, ids: torch.Tensor) -> str:
        """Step, row and token of the first candidate where `bad` [B, K] is set; empty when it is nowhere."""
        if not bool(bad.any()):
            return ""
        row, column = bad.nonzero()[0].tolist()
        return f"{self._step_name(input_ids)}, row {row}, candidate token {int(ids[row, column])}"

    def _amounts(self, normalized: torch.Tensor) -> torch.Tensor:
        return self.beta * normalized if self.beta else torch.zeros_like(normalized)  # 0 times -inf would be NaN

    def _step_name(self, input_ids: torch.Tensor) -> str:
        tokens = input_ids.size(1)
        prompt = None if self.prompt_ids is None else self.prompt_ids.size(1)
        if prompt is None or tokens < prompt:
            return f"the step after {tokens} tokens"
        return f"step {tokens - prompt} (after {tokens} tokens)"

    def _record(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        ids: torch.Tensor,
        values: torch.Tensor,
        normalized: torch.Tensor,
        valid: torch.Tensor,
    ) -> ValueStepRecord:
        incoming = scores.gather(1, ids)
        tensors = [tensor.detach().cpu() for tensor in (ids, incoming, values, normalized, valid)]
        return ValueStepRecord(input_ids.size(1), *tensors)

    def _shift(
        self, scores: torch.Tensor, ids: torch.Tensor, normalized: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        incoming = scores.gather(1, ids)
        # Invalid entries keep the score that came in: they stand for tokens already at -inf or outside the set.
        shifted = torch.where(valid, incoming + self._amounts(normalized).to(scores.dtype), incoming)
        if not self.mask_non_candidates:
            return scores.scatter(1, ids, shifted)
        masked = torch.full_like(scores, float("-inf"))
        return masked.scatter(1, ids, shifted.masked_fill(~valid, float("-inf")))


def normalize_values(values: torch.Tensor, valid: torch.Tensor, mode: str) -> torch.Tensor:
    """Normalised values [B, K]; `minmax` and `softmax` look at a row's valid candidates only.

    Args:
        values: [B, K] float.
        valid: [B, K] bool.
        mode: one of NORMALIZATIONS.
    """
    if mode == "clamp":
        return values.clamp(0.0, 1.0)
    if mode == "softmax":
        share = torch.softmax(values.masked_fill(~valid, float("-inf")), dim=-1)
        return share.masked_fill(~valid, 0.0)
    if mode == "minmax":
        low = values.masked_fill(~valid, float("inf")).amin(dim=-1, keepdim=True)
        span = values.masked_fill(~valid, float("-inf")).amax(dim=-1, keepdim=True) - low
        scaled = (values - low) / span.clamp_min(_FLAT)
        return torch.where(span > _FLAT, scaled, torch.full_like(values, 0.5))
    return values
