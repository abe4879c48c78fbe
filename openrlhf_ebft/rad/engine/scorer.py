"""Scores of the candidates of many requests with one reward model, in one forward a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from openrlhf_ebft.rad.cached_value import CachedRewardModelValue
from openrlhf_ebft.rad.engine import attention
from openrlhf_ebft.rad.engine.blocks import BLOCK, BlockPool
from openrlhf_ebft.rad.engine.cache import Forward, PagedCache, Segment, Slots, layer_shapes
from openrlhf_ebft.rad.engine.candidate_groups import candidate_groups
from openrlhf_ebft.rad.engine.full_check import check_small_steps, check_step
from openrlhf_ebft.rad.engine.prefix import StoredPrefix
from openrlhf_ebft.rad.engine.score_row import ScoreRow
from openrlhf_ebft.rad.reward_model_value import RewardModelValue, backbone_of
from openrlhf_ebft.rad.tree_inputs import AttentionWindows
from openrlhf_ebft.rad.values import StepContext, extract_score


@dataclass
class ScorerStatistics:
    """Running totals of one reward model. Times in seconds."""

    steps: int = 0
    forwards: int = 0
    candidate_tokens: int = 0
    prefix_tokens: int = 0
    rows_without_room: int = 0
    forward_seconds: float = 0.0


@dataclass
class _LastStep:
    """Candidates of the last step: for each of its forwards, per layer, keys and values [heads, N, width]."""

    number: int = 0
    forwards: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)


class PrefixScorer:
    """A reward model with a preallocated cache of prefixes.

    Every prefix is computed once and kept; a step scores all candidates of all rows in one forward, each candidate
    seeing its row's prefix and itself. When the candidate of a row turns out to be its next token, its entry moves
    into the prefix. Scores equal those of a full forward over prefix + candidate, whatever requests do.

    Args:
        reward_model: decoder-only classifier with a `score` head that attends with `sdpa`, eval mode.
        rm_tokenizer: read for its length limit only.
        cache_tokens: prefix tokens that the cache holds (rounded down to whole blocks).
        prefill_tokens: new prefix tokens of one forward at most.
        refuse_when_full: a row without room in the cache is refused; otherwise it is scored without the cache.
        verify: compare every score with a full forward; a difference is a RuntimeError.

    Raises:
        ValueError: the model cannot be scored this way; the message says why.
    """

    def __init__(
        self,
        reward_model: Any,
        rm_tokenizer: Any = None,
        *,
        cache_tokens: int,
        prefill_tokens: int = 1024,
        refuse_when_full: bool = False,
        verify: bool = False,
    ) -> None:
        used = reward_model.config.get_text_config()._attn_implementation
        if used not in ("sdpa", attention.NAME):
            raise ValueError(f"it attends with {used!r}, and only 'sdpa' can be replaced by attention over blocks")
        self.reward_model = reward_model
        # Raises for models without a head per position or without a key and value per token.
        CachedRewardModelValue(reward_model, rm_tokenizer)
        full = RewardModelValue(reward_model, rm_tokenizer)
        reward_model.set_attn_implementation(attention.NAME)
        parameter = next(reward_model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.max_length = full.max_length
        self.vocab_limit: int = reward_model.get_input_embeddings().num_embeddings
        self.columns = reward_model.config.num_labels
        self.prefill_tokens, self.refuse_when_full, self.verify = prefill_tokens, refuse_when_full, verify
        if cache_tokens < 2 * BLOCK:
            raise ValueError(f"a cache of {cache_tokens} tokens is too small: at least {2 * BLOCK} are needed")
        self.pool = BlockPool(cache_tokens // BLOCK)
        self.cache = PagedCache(layer_shapes(reward_model), self.pool.size, self.dtype, self.device)
        self.statistics = ScorerStatistics()
        self.windows = AttentionWindows(reward_model.config.get_text_config())
        self._uncached: dict[tuple[int, str], CachedRewardModelValue] = {}
        self._last = _LastStep()
        self.windows_seen: set[int | None] = set()  # of the last forward
        zero = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        # A mask of four axes is handed on as it is; attention over blocks does not read it.
        kinds = ("full_attention", "sliding_attention")
        self._mask = dict.fromkeys(kinds, zero) if self.windows.per_kind else zero
        check_small_steps(self)
        self.statistics = ScorerStatistics()

    def release(self, prefix: StoredPrefix) -> None:
        """A request is gone (finished, aborted, preempted): its blocks may be used by others or by its return."""
        prefix.release(self.pool)

    @torch.inference_mode()
    def score(self, rows: list[ScoreRow], *, is_same_step: bool = False) -> torch.Tensor:
        """Scores of all rows' candidates, one after the other, [sum of K] float32 on the model's device.

        Rows that are refused are marked so (`row.refused`), and their scores are zeros.

        Args:
            rows: of this step.
            is_same_step: these are more candidates of rows that the last call has scored; none of them comes twice.

        Raises:
            RuntimeError: `verify` found a difference.
        """
        started = time.perf_counter()
        try:
            if not is_same_step:
                self._keep_chosen(rows)
                self._last = _LastStep(self._last.number + 1)
            scores = self._score(rows)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
        except BaseException:
            # A forward that stopped half way leaves blocks that are known but not written.
            self.pool.forget_all()
            self._last = _LastStep(self._last.number + 1)
            raise
        self.statistics.steps += not is_same_step
        self.statistics.candidate_tokens += scores.numel()
        self.statistics.forward_seconds += time.perf_counter() - started
        if self.verify:
            check_step(self, rows, scores)
        return scores

    def _score(self, rows: list[ScoreRow]) -> torch.Tensor:
        stored = [row for row in rows if self._make_room(row)]
        if len(stored) == len(rows):
            return self._score_stored(rows)
        parts: dict[int, torch.Tensor] = {}
        if stored:
            flat = self._score_stored(stored)
            parts = dict(zip(map(id, stored), flat.split([len(row.candidates) for row in stored]), strict=True))
        return torch.cat([parts[id(row)] if id(row) in parts else self._score_apart(row) for row in rows])

    def _score_apart(self, row: ScoreRow) -> torch.Tensor:
        """Scores [K] of a row without room: computed from its tokens alone, nothing kept."""
        if row.refused:
            return torch.zeros(len(row.candidates), device=self.device)
        value = self._uncached.get(row.reading)
        if value is None:
            value = CachedRewardModelValue(
                self.reward_model,
                score_index=row.score_index,
                score_transform=row.score_transform,
                max_length=self.max_length,
            )
            self._uncached[row.reading] = value
        step = StepContext(torch.tensor([row.tokens]), torch.tensor([row.candidates], device=self.device))
        return value.for_call().score(step)[0]

    def _keep_chosen(self, rows: list[ScoreRow]) -> None:
        """Moves the entry of each row's newest token, if it was a candidate of the last step, into its prefix."""
        moves: dict[int, tuple[list[int], list[tuple[int, int]]]] = {}  # by forward: places there, slots here
        for row in rows:
            prefix, covered = row.prefix, row.prefix.covered
            if prefix.generation != self.pool.generation:
                prefix.release(self.pool)
            if prefix.step != self._last.number or len(row.tokens) != covered + 1:
                continue
            if row.tokens[-1] not in prefix.places or not prefix.reserve(self.pool, covered + 1):
                continue
            forward, place = prefix.places[row.tokens[-1]]
            places, slots = moves.setdefault(forward, ([], []))
            places.append(place)
            slots += prefix.slots(covered, covered + 1)
            prefix.cover(self.pool, row.tokens, covered + 1)
        for forward, (places, pairs) in moves.items():
            targets = Slots.of(pairs, self.device)
            index = torch.tensor(places, device=self.device)
            for layer, (keys, values) in enumerate(self._last.forwards[forward]):
                self.cache.write(layer, targets, keys[:, index], values[:, index])

    def _make_room(self, row: ScoreRow) -> bool:
        """Room for the row's whole prefix; False when it is too long for the model or the cache is full."""
        prefix, length = row.prefix, len(row.tokens)
        if self.max_length is not None and length >= self.max_length:
            # The model reads the last tokens only, and every step moves all their positions: nothing can be kept.
            prefix.release(self.pool)
            return False
        if prefix.covered > length:  # tokens were taken back
            prefix.release(self.pool)
        if prefix.covered == 0:
            prefix.adopt(self.pool, row.tokens)
        if prefix.reserve(self.pool, length):
            return True
        prefix.release(self.pool)
        row.refused = self.refuse_when_full
        self.statistics.rows_without_room += 1
        return False

    def _score_stored(self, rows: list[ScoreRow]) -> torch.Tensor:
        """Scores [sum of K] of rows with room, in their order; computes what their prefixes lack."""
        while sum(len(row.tokens) - row.prefix.covered for row in rows) > self.prefill_tokens:
            self._run(self._prefix_forward(rows, self.prefill_tokens), [])
        forward = self._prefix_forward(rows, self.prefill_tokens)
        by_k = sorted(range(len(rows)), key=lambda place: len(rows[place].candidates))
        arranged = [rows[place] for place in by_k]
        forward.groups = candidate_groups(arranged, forward.new_tokens, self.device)
        hidden = self._run(forward, arranged)
        logits = self.reward_model.score(hidden)
        self._note_places(arranged, forward)
        parts = [torch.empty(0)] * len(rows)
        flat = self._read(arranged, logits)
        for place, part in zip(by_k, flat.split([len(row.candidates) for row in arranged]), strict=True):
            parts[place] = part
        return torch.cat(parts) if by_k != sorted(by_k) else flat

    def _note_places(self, rows: list[ScoreRow], forward: Forward) -> None:
        """Keeps the candidates' entries until the next step, and where each row's lie."""
        number = len(self._last.forwards)
        self._last.forwards.append(forward.candidates)
        offset = 0
        for row in rows:
            prefix = row.prefix
            if prefix.step != self._last.number:
                prefix.step, prefix.places = self._last.number, {}
            prefix.places |= {token: (number, offset + place) for place, token in enumerate(row.candidates)}
            offset += len(row.candidates)

    def _read(self, rows: list[ScoreRow], logits: torch.Tensor) -> torch.Tensor:
        """Scores [N] from logits [N, columns], as each row wants them read."""
        if len({row.reading for row in rows}) == 1:
            return extract_score(logits, *rows[0].reading)
        parts = logits.split([len(row.candidates) for row in rows])
        return torch.cat([extract_score(part, *row.reading) for row, part in zip(rows, parts, strict=True)])

    def _prefix_forward(self, rows: list[ScoreRow], most: int) -> Forward:
        """A forward over at most `most` tokens that the prefixes lack, in the rows' order."""
        pairs: list[tuple[int, int]] = []
        segments = []
        tokens: list[int] = []
        positions: list[int] = []
        for row in rows:
            prefix = row.prefix
            if prefix.covered == 0 and len(tokens) < most:
                # An earlier row of this very step may be about to fill blocks that this row needs too.
                prefix.adopt(self.pool, row.tokens)
            count = min(len(row.tokens) - prefix.covered, most - len(tokens))
            if count == 0:
                continue
            start, end = prefix.covered, prefix.covered + count
            table = torch.tensor(prefix.blocks[: -(-end // BLOCK)], device=self.device)
            segments.append(Segment(len(tokens), count, start, table))
            tokens += row.tokens[start:end]
            positions += range(start, end)
            pairs += prefix.slots(start, end)
            prefix.cover(self.pool, row.tokens, end)
        slots = Slots.of(pairs, self.device) if pairs else None
        self.statistics.prefix_tokens += len(tokens)
        windowed = self.windows.window is not None
        return Forward(self.cache, slots, len(tokens), tokens, positions, segments, [], windowed)

    def _run(self, forward: Forward, rows: list[ScoreRow]) -> torch.Tensor:
        """Hidden states [N, H] of the rows' candidates; the entries of the new prefix tokens land in the cache."""
        tokens = forward.token_ids + [token for row in rows for token in row.candidates]
        positions = forward.positions + [len(row.tokens) for row in rows for _ in row.candidates]
        self.statistics.forwards += 1
        with attention.running(forward):
            output = backbone_of(self.reward_model)(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                attention_mask=self._mask,
                past_key_values=forward.as_transformers_cache(),
                use_cache=True,
            )
        self.windows_seen = forward.windows_seen
        return output.last_hidden_state[0, forward.new_tokens :]
