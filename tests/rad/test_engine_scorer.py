"""Scores from the preallocated cache equal a full forward of prefix + candidate, whatever the requests do."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig

from openrlhf_ebft.rad.cached_value import score_difference
from openrlhf_ebft.rad.engine import candidate_groups
from openrlhf_ebft.rad.engine.blocks import BLOCK
from openrlhf_ebft.rad.engine.prefix import StoredPrefix
from openrlhf_ebft.rad.engine.score_row import ScoreRow
from openrlhf_ebft.rad.engine.scorer import PrefixScorer
from tests.rad.conftest import GATED, SPREAD, VOCAB, configs, encoder_configs, make_classifier, windowed_configs
from tests.rad.test_cached_scores import by_hand, reward_of

TOLERANCE = 1e-5


def long_llama(**changes):
    return make_classifier(LlamaConfig(**{**GATED, **SPREAD, "max_position_embeddings": 256, **changes}))


class Request:
    """A request of the simulated engine: its tokens grow by one of the candidates, mostly."""

    def __init__(self, rng: random.Random, length: int, k: int, start: list[int] | None = None) -> None:
        self.prefix = StoredPrefix()
        self.tokens = (start or []) + [rng.randrange(VOCAB) for _ in range(length)]
        self.k = k

    def row(self, rng: random.Random) -> ScoreRow:
        return ScoreRow(self.prefix, list(self.tokens), rng.sample(range(VOCAB), self.k), 0, "none")

    def advance(self, rng: random.Random, row: ScoreRow) -> None:
        surprise = rng.random() < 0.1  # a token that was no candidate
        self.tokens.append(rng.randrange(VOCAB) if surprise else rng.choice(row.candidates))


def step(scorer: PrefixScorer, model, requests: list[Request], rng: random.Random) -> None:
    rows = [request.row(rng) for request in requests]
    got = scorer.score(rows)
    limit = scorer.max_length
    want = [
        by_hand(model, row.tokens if limit is None else row.tokens[-(limit - 1) :], candidate)
        for row in rows
        for candidate in row.candidates
    ]
    assert score_difference(got, torch.tensor(want)) <= TOLERANCE
    assert torch.tensor(want).std() > 1e-3
    for request, row in zip(requests, rows, strict=True):
        request.advance(rng, row)


@pytest.mark.parametrize("name", sorted(configs()))
def test_every_architecture(name, tmp_path):
    """Rows of 3, 5 and 20 tokens with 4, 4 and 7 candidates, 8 steps; a step costs its candidates only."""
    model = reward_of(name, tmp_path)
    scorer = PrefixScorer(model, cache_tokens=8 * BLOCK)
    rng = random.Random(1)
    requests = [Request(rng, 3, 4), Request(rng, 5, 4), Request(rng, 20, 7)]
    for request in requests:
        request.advance = lambda rng, row, request=request: request.tokens.append(rng.choice(row.candidates))
    for _ in range(8):
        step(scorer, model, requests, rng)
    assert scorer.statistics.prefix_tokens == 28, "every prompt token once, and no completion token"
    assert scorer.statistics.candidate_tokens == 8 * 15
    assert scorer.statistics.forwards == 8


@pytest.mark.parametrize("name", sorted(windowed_configs()))
def test_sliding_windows(name):
    model = make_classifier(windowed_configs()[name])
    scorer = PrefixScorer(model, cache_tokens=8 * BLOCK)
    rng = random.Random(2)
    requests = [Request(rng, 2, 3), Request(rng, 19, 3), Request(rng, 33, 5)]
    for _ in range(6):
        step(scorer, model, requests, rng)


@pytest.mark.parametrize(
    ("blocks", "prefill", "padding"), [(64, 1000, 5000), (64, 7, 0), (12, 1000, 0), (12, 20, 5000), (3, 50, 5000)]
)
def test_requests_come_and_go(blocks, prefill, padding, monkeypatch):
    """100 steps of random joins (some with a shared start), departures, pauses, returns and taken-back tokens.

    With 12 blocks the cache is often full and prefixes are forgotten; with 3 most rows find no room at all. Without
    padding, rows with 2 and with 5 candidates have an attention each.
    """
    monkeypatch.setattr(candidate_groups, "_MOST_PADDING", padding)
    model = long_llama()
    scorer = PrefixScorer(model, cache_tokens=blocks * BLOCK, prefill_tokens=prefill)
    rng = random.Random(blocks * 1000 + prefill)
    common = [rng.randrange(VOCAB) for _ in range(40)]
    running: list[Request] = []
    away: list[Request] = []
    for _ in range(100):
        if len(running) < 5 and rng.random() < 0.4:
            start = common[: rng.choice([0, 16, 33, 40])]
            running += [
                Request(rng, rng.randrange(1, 30), rng.choice([2, 5]), start) for _ in range(rng.choice([1, 2]))
            ]
        if running and rng.random() < 0.15:
            gone = running.pop(rng.randrange(len(running)))
            scorer.release(gone.prefix)
            if rng.random() < 0.7 and len(gone.tokens) < 120:
                away.append(gone)
        if away and rng.random() < 0.3:
            back = away.pop()
            back.prefix = StoredPrefix()
            running.append(back)
        if running and rng.random() < 0.05:
            victim = rng.choice(running)
            scorer.release(victim.prefix)
            del victim.tokens[-rng.randrange(1, 4) :]
            victim.tokens = victim.tokens or [1]
        rng.shuffle(running)
        served = [request for request in running if rng.random() < 0.9]  # some are not scheduled in this step
        if served:
            step(scorer, model, served, rng)
    if blocks == 64:
        assert scorer.statistics.rows_without_room == 0
    if blocks == 3:
        assert scorer.statistics.rows_without_room > 20
    for request in running:
        scorer.release(request.prefix)
    assert scorer.pool.used == 0


def test_equal_prompts_are_computed_once_and_a_returning_request_is_found():
    model = long_llama()
    scorer = PrefixScorer(model, cache_tokens=32 * BLOCK)
    rng = random.Random(3)
    prompt = [rng.randrange(VOCAB) for _ in range(2 * BLOCK + 3)]
    siblings = [Request(rng, 0, 4, prompt) for _ in range(3)]
    step(scorer, model, siblings, rng)
    assert scorer.statistics.prefix_tokens == 2 * BLOCK + 3 * 3
    for _ in range(BLOCK):
        step(scorer, model, siblings, rng)
    before = scorer.statistics.prefix_tokens
    scorer.release(siblings[0].prefix)
    siblings[0].prefix = StoredPrefix()
    step(scorer, model, siblings, rng)
    newly = scorer.statistics.prefix_tokens - before
    assert newly <= len(siblings[0].tokens) - 1 - 3 * BLOCK + 2, "only the unfinished block is computed again"


def test_prefix_longer_than_the_reward_model_reads():
    """Limit 32: from 32 tokens on only the last 31 count, as everywhere in the package."""
    model = make_classifier(LlamaConfig(**{**GATED, **SPREAD, "max_position_embeddings": 32}))
    scorer = PrefixScorer(model, cache_tokens=16 * BLOCK, verify=True)
    assert scorer.max_length == 32
    rng = random.Random(4)
    requests = [Request(rng, 28, 3), Request(rng, 5, 3), Request(rng, 50, 3)]
    for _ in range(8):
        step(scorer, model, requests, rng)
    assert scorer.pool.used == 1


def test_rows_read_different_columns_and_transforms():
    model = make_classifier(configs()["llama"], labels=3)
    scorer = PrefixScorer(model, cache_tokens=16 * BLOCK)
    readings = [(0, "none"), (2, "sigmoid"), (1, "softmax"), (0, "none")]
    rows = [ScoreRow(StoredPrefix(), [3, 4, 5 + n], [7, 8 + n], *reading) for n, reading in enumerate(readings)]
    got = scorer.score(rows)
    for row, scores in zip(rows, got.split(2), strict=True):
        for candidate, score in zip(row.candidates, scores, strict=True):
            with torch.no_grad():
                hidden = model.model(input_ids=torch.tensor([[*row.tokens, candidate]])).last_hidden_state
                logits = model.score(hidden[0, -1])
            column = {"none": logits, "sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1)}[row.score_transform]
            assert float(score) == pytest.approx(float(column[row.score_index]), abs=1e-5)


def test_full_cache_refuses_only_the_row_without_room():
    model = long_llama()
    scorer = PrefixScorer(model, cache_tokens=4 * BLOCK, refuse_when_full=True)
    rng = random.Random(5)
    small, large = Request(rng, 10, 3), Request(rng, 5 * BLOCK, 3)
    rows = [small.row(rng), large.row(rng)]
    got = scorer.score(rows)
    assert [row.refused for row in rows] == [False, True]
    want = [by_hand(model, rows[0].tokens, candidate) for candidate in rows[0].candidates]
    assert score_difference(got[:3], torch.tensor(want)) <= TOLERANCE
    assert got[3:].tolist() == [0, 0, 0]


def test_a_failed_forward_leaves_no_wrong_entries(monkeypatch):
    """The forward stops in its second layer; the next step starts from nothing and is right."""
    model = long_llama()
    scorer = PrefixScorer(model, cache_tokens=32 * BLOCK)
    rng = random.Random(6)
    requests = [Request(rng, 20, 3), Request(rng, 40, 3)]
    step(scorer, model, requests, rng)
    idle = requests.pop()  # not part of the step that fails
    newcomer = Request(rng, 35, 3)
    layer = model.model.layers[1]
    with monkeypatch.context() as patched:
        patched.setattr(layer, "forward", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            scorer.score([request.row(rng) for request in [*requests, newcomer]])
    for _ in range(3):
        step(scorer, model, [*requests, newcomer, idle], rng)


def test_verify_notices_a_wrong_entry():
    model = long_llama()
    scorer = PrefixScorer(model, cache_tokens=32 * BLOCK, verify=True)
    rng = random.Random(7)
    requests = [Request(rng, 20, 3)]
    step(scorer, model, requests, rng)
    scorer.cache.values[0][requests[0].prefix.blocks[0]] += 1.0
    with pytest.raises(RuntimeError, match="scores differ from a full forward by"):
        scorer.score([requests[0].row(rng)])


@pytest.mark.parametrize("name", sorted(encoder_configs()))
def test_encoders_are_refused(name):
    with pytest.raises(ValueError, match="decoder-only|attends with"):
        PrefixScorer(make_classifier(encoder_configs()[name]), cache_tokens=64)


def test_eager_attention_is_refused():
    model = make_classifier(configs()["llama"])
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="it attends with 'eager'"):
        PrefixScorer(model, cache_tokens=64)


def test_half_precision_stays_close():
    model = long_llama().to(torch.bfloat16)
    scorer = PrefixScorer(model, cache_tokens=32 * BLOCK, verify=True)
    rng = random.Random(8)
    requests = [Request(rng, 20, 3), Request(rng, 50, 3)]
    for _ in range(4):
        rows = [request.row(rng) for request in requests]
        scorer.score(rows)
        for request, row in zip(requests, rows, strict=True):
            request.advance(rng, row)
