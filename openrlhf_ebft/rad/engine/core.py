"""RAD for a whole batch of an engine: candidates, scores of all reward models, shifted logits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from openrlhf_ebft.rad.candidates import select_candidates
from openrlhf_ebft.rad.engine.blocks import BLOCK
from openrlhf_ebft.rad.engine.choices import Choice, Group, most_shift, plan_first, plan_rest
from openrlhf_ebft.rad.engine.config import RADEngineConfig
from openrlhf_ebft.rad.engine.engine_row import EngineRow, RowTerm
from openrlhf_ebft.rad.engine.prefix import StoredPrefix
from openrlhf_ebft.rad.engine.request import RADRequest
from openrlhf_ebft.rad.engine.score_row import ScoreRow
from openrlhf_ebft.rad.engine.scorer import PrefixScorer
from openrlhf_ebft.rad.engine.trace import ErrorStore, TraceStep, TraceStore

logger = logging.getLogger(__name__)


class RADEngine:
    """Steers the rows of a batch that ask for it; others are not touched.

    A request that cannot be steered (unknown reward model, no room in the cache by configuration, NaN from the reward
    model, ...) is ended: from then on only its stop token is possible. Its error is logged, counted, in its trace,
    and kept under the id that it gave as `report`.

    Args:
        config: names and limits.
        scorers: a scorer for every name in `config.reward_models`.
    """

    def __init__(self, config: RADEngineConfig, scorers: Mapping[str, PrefixScorer]) -> None:
        self.config = config
        self.scorers = dict(scorers)
        self.traces = TraceStore()
        self.errors = ErrorStore()
        self.requests = 0
        self.failed_requests = 0
        self.steered_tokens = 0
        self.ruled_out_candidates = 0

    def add(
        self,
        request: RADRequest,
        prompt: Sequence[int] | None,
        outputs: Sequence[int],
        stop_ids: Sequence[int] = (),
        *,
        is_greedy: bool = False,
    ) -> EngineRow:
        """A request that joins the batch, new or resumed. `outputs` is read again in every step.

        `is_greedy` says that the engine takes the best token and looks at no other.
        """
        row = EngineRow(request, prompt or (), outputs, tuple(stop_ids), is_greedy)
        if not outputs:
            self.requests += 1
        if request.trace is not None:
            row.trace = self.traces.open(request.trace, outputs)
        try:
            if prompt is None:
                raise ValueError("a prompt without token ids (embeddings) cannot be scored by a reward model")
            row.terms = self._terms(request)
        except ValueError as fault:
            self._fail(row, str(fault))
            return row
        row.prefixes = {term.model: StoredPrefix() for term in row.terms}
        return row

    def remove(self, row: EngineRow) -> None:
        """A request that left the batch: finished, aborted or preempted."""
        self.pause(row)
        if row.trace is not None:
            row.trace.running = False

    def pause(self, row: EngineRow) -> None:
        """A request that is not served for now: its blocks may be used by others; what is left it finds again."""
        for name, prefix in row.prefixes.items():
            self.scorers[name].release(prefix)

    def apply(self, logits: torch.Tensor, rows: Mapping[int, EngineRow]) -> None:
        """Shifts and masks the logits [B, V] float32 of the given rows in place.

        Args:
            logits: of the step, as the sampler would use them.
            rows: place in the batch -> request; other places stay bit for bit as they are.
        """
        steered = [(index, row) for index, row in sorted(rows.items()) if self._refresh(row)]
        groups = self._select(logits, steered)
        plan_first(groups)
        self._score([choice for group in groups for choice in group.choices], is_more=False)
        if late := plan_rest(groups):
            self._score(late, is_more=True)
        for group in groups:
            self._shift(logits, group)
        for index, row in rows.items():
            if row.error is not None:
                _only_stop(logits[index], row.stop_ids)

    def sizes(self) -> list[str]:
        """One sentence for each reward model: where it comes from and how large its cache is."""
        return [
            f"RAD: reward model {name} ({self.config.reward_models[name].path}): prefix cache of "
            f"{scorer.pool.size * BLOCK} tokens, {scorer.cache.bytes / 2**30:.3f} GiB"
            for name, scorer in self.scorers.items()
        ]

    def statistics(self) -> dict[str, Any]:
        """Totals since the start: requests, tokens, and per reward model forwards, seconds and cache use in tokens."""
        return {
            "requests": self.requests,
            "failed_requests": self.failed_requests,
            "steered_tokens": self.steered_tokens,
            "ruled_out_candidates": self.ruled_out_candidates,
            "reward_models": {
                name: asdict(scorer.statistics)
                | {
                    "cache_tokens_used": scorer.pool.used * BLOCK,
                    "cache_tokens": scorer.pool.size * BLOCK,
                    "cache_bytes": scorer.cache.bytes,
                }
                for name, scorer in self.scorers.items()
            },
        }

    def _terms(self, request: RADRequest) -> tuple[RowTerm, ...]:
        self.config.check_request(request)
        terms = []
        for term in request.terms():
            name = self.config.model_name(term.model)
            model, columns = self.config.reward_models[name], self.scorers[name].columns
            index = model.score_index if request.score_index is None else request.score_index
            if index >= columns:
                raise ValueError(f"rad_score_index is {index}, but reward model {name!r} has {columns} output columns")
            terms.append(
                RowTerm(name, term.factor, term.invert, index, request.score_transform or model.score_transform)
            )
        return tuple(terms)

    def _fail(self, row: EngineRow, reason: str) -> None:
        row.error = reason
        self.failed_requests += 1
        logger.error("RAD: a request was ended: %s", reason)
        if row.request.report is not None:
            self.errors.put(row.request.report, reason)
        if row.trace is not None:
            row.trace.error = reason

    def _vocab_limit(self, row: EngineRow) -> int:
        return min(self.scorers[term.model].vocab_limit for term in row.terms)

    def _refresh(self, row: EngineRow) -> bool:
        """Brings a row's tokens up to date; False when it cannot be steered."""
        if row.error is not None:
            return False
        try:
            kept = row.refresh(self._vocab_limit(row))
        except ValueError as fault:
            self._fail(row, str(fault))
            return False
        if not kept:
            self.pause(row)
        return True

    def _select(self, logits: torch.Tensor, rows: list[tuple[int, EngineRow]]) -> list[Group]:
        """Candidates of every row; rows that leave no candidate are failed."""
        alike: dict[tuple[int, int], list[tuple[int, EngineRow]]] = {}
        for index, row in rows:
            limit = min(self._vocab_limit(row), logits.size(1))
            alike.setdefault((min(row.request.top_k, limit), limit), []).append((index, row))
        groups = []
        for (k, limit), members in alike.items():
            places = [index for index, _ in members]
            scores = logits if places == list(range(logits.size(0))) else logits[places]
            ids, valid = select_candidates(scores[:, :limit], "top_k", k=k)
            best = scores.gather(1, ids)
            some = valid[:, 0].tolist()
            choices = []
            for (index, row), candidates, possible in zip(members, ids.tolist(), some, strict=True):
                choices.append(Choice(index, row, candidates, most_shift(row)))
                if not possible:
                    self._fail(row, f"no possible token is among the {limit} that the reward model knows")
            groups.append(Group(choices, ids, valid, best))
        return groups

    def _score(self, choices: list[Choice], *, is_more: bool) -> None:
        """Rewards of the candidates that are wanted and have none yet."""
        before = [choice.shift for choice in choices]
        for choice in choices:
            choice.shift = None
        for name in self.scorers:
            self._add_rewards(name, choices, is_more)
        for choice, earlier in zip(choices, before, strict=True):
            if earlier is not None and choice.shift is not None:
                choice.shift = torch.cat([earlier, choice.shift])
            choice.scored = choice.wanted

    def _add_rewards(self, name: str, choices: list[Choice], is_more: bool) -> None:
        """Adds one reward model's part to the shift of the rows that use it."""
        using = [
            (choice, term)
            for choice in choices
            for term in choice.row.terms
            if term.model == name and choice.row.error is None and (term.factor > 0 or choice.row.trace is not None)
        ]
        if not using:
            return
        rows = [
            ScoreRow(
                choice.row.prefixes[name],
                choice.row.tokens,
                choice.candidates[choice.scored : choice.wanted],
                term.score_index,
                term.score_transform,
            )
            for choice, term in using
        ]
        sizes = [len(row.candidates) for row in rows]
        scores = self.scorers[name].score(rows, is_same_step=is_more)
        repeat = torch.tensor(sizes, device=scores.device)
        factors = torch.tensor([term.factor for _, term in using], device=scores.device).repeat_interleave(repeat)
        inverted = torch.tensor([term.invert for _, term in using], device=scores.device).repeat_interleave(repeat)
        rewards = scores.clamp(0.0, 1.0)
        shifts = factors * torch.where(inverted, 1 - rewards, rewards)
        parts = zip(using, rows, shifts.split(sizes), rewards.split(sizes), strict=True)
        for (choice, _), scored, shift, reward in parts:
            if scored.refused:
                cache = self.scorers[name].pool.size * BLOCK
                self._fail(choice.row, f"no room for {len(scored.tokens)} tokens in the cache of {cache} of {name!r}")
            choice.shift = shift if choice.shift is None else choice.shift + shift
            if choice.row.trace is not None:
                choice.rewards = (choice.rewards or {}) | {name: reward}

    def _shift(self, logits: torch.Tensor, group: Group) -> None:
        """Writes a group's shifted logits; everything else of its rows becomes -inf."""
        shift = group.shifts()
        self._check_numbers(group, shift)
        places = torch.tensor([choice.index for choice in group.choices], device=logits.device)
        shifted = (group.scores + shift.to(logits.dtype)).masked_fill_(~group.valid, float("-inf"))
        logits.index_fill_(0, places, float("-inf"))
        logits[places[:, None], group.ids] = shifted
        served = [choice for choice in group.choices if choice.row.error is None]
        self.steered_tokens += len(served)
        self.ruled_out_candidates += sum(len(choice.candidates) - choice.scored for choice in served)
        for choice, valid, added in zip(group.choices, group.valid, shift, strict=True):
            if choice.row.trace is not None and choice.row.error is None:
                number = len(choice.row.tokens) - len(choice.row.prompt)
                choice.row.trace.steps[number] = _recorded(choice, valid, added)

    def _check_numbers(self, group: Group, shift: torch.Tensor) -> None:
        bad = shift.isnan() & group.valid
        if not bool(bad.any()):
            return
        for place, column in bad.nonzero().tolist():
            choice = group.choices[place]
            if choice.row.error is None:
                token = choice.candidates[column]
                self._fail(
                    choice.row, f"the reward is NaN after {len(choice.row.tokens)} tokens, candidate token {token}"
                )


def _recorded(choice: Choice, valid: torch.Tensor, shift: torch.Tensor) -> TraceStep:
    count = int(valid.sum())  # possible candidates come first
    rewards = {name: values[:count].tolist() for name, values in (choice.rewards or {}).items()}
    return TraceStep(choice.candidates[:count], rewards, shift[:count].tolist())


def _only_stop(logits: torch.Tensor, stop_ids: Sequence[int]) -> None:
    """Leaves a stop token as the only possible one in a row [V]; without any, token 0."""
    stop = next((token for token in stop_ids if 0 <= token < logits.size(0)), 0)
    logits.fill_(float("-inf"))
    logits[stop] = 0.0
