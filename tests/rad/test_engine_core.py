"""A batch through the engine-free core: shifts equal the library's processor, faults end one request only."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ebft.rad import CachedRewardModelValue, ValueGuidedProcessor
from openrlhf_ebft.rad.engine.blocks import BLOCK
from openrlhf_ebft.rad.engine.config import RADEngineConfig
from openrlhf_ebft.rad.engine.core import RADEngine
from openrlhf_ebft.rad.engine.request import RADRequest
from openrlhf_ebft.rad.engine.scorer import PrefixScorer
from openrlhf_ebft.rad.engine.trace import token_rewards, trace_of
from tests.rad.conftest import VOCAB, configs, make_classifier

NAMES = ("kind", "toxic")


def models():
    return {name: make_classifier(configs()["llama"], seed=seed) for seed, name in enumerate(NAMES)}


def engine_of(classifiers, **changes):
    entry = {name: {"path": name, "score_transform": "sigmoid"} for name in classifiers}
    config = RADEngineConfig.model_validate({"reward_models": entry, "default": "kind"} | changes)
    refuse = config.when_full == "error"
    scorers = {
        name: PrefixScorer(model, cache_tokens=16 * BLOCK, refuse_when_full=refuse, verify=True)
        for name, model in classifiers.items()
    }
    return RADEngine(config, scorers)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def library(model, tokens, row, **arguments):
    """What the library's processor makes of one row of logits."""
    value = CachedRewardModelValue(model, score_transform="sigmoid")
    processor = ValueGuidedProcessor(value, normalize="clamp", **arguments)
    return processor(torch.tensor([tokens]), row[None].clone())[0]


def test_rows_equal_the_librarys_processor_and_others_keep_every_bit():
    classifiers = models()
    engine = engine_of(classifiers)
    outputs = [[], [7, 8], [5]]
    rows = {
        1: engine.add(RADRequest(10.0, top_k=5), [3, 4], outputs[0]),
        3: engine.add(RADRequest(4.0, top_k=9, invert=True, reward_model="toxic"), [9] * 20, outputs[1]),
        4: engine.add(RADRequest(0.0, top_k=5), [3], outputs[2]),
    }
    for step in range(4):
        before = logits(6, step)
        after = before.clone()
        engine.apply(after, rows)
        for place in (0, 2, 5):
            assert torch.equal(after[place], before[place])
        first = library(classifiers["kind"], [3, 4, *outputs[0]], before[1], k=5, beta=10.0)
        assert torch.allclose(after[1], first, atol=1e-4)
        second = library(classifiers["toxic"], [9] * 20 + outputs[1], before[3], k=9, beta=4.0, invert=True)
        assert torch.allclose(after[3], second, atol=1e-4)
        best = before[4].topk(5).indices
        assert torch.equal(after[4, best], before[4, best])
        assert int(after[4].isfinite().sum()) == 5
        for place, output in zip((1, 3, 4), outputs, strict=True):
            output.append(int(after[place].argmax()))


def test_a_weighted_sum_of_two_reward_models():
    classifiers = models()
    engine = engine_of(classifiers)
    request = RADRequest(1.0, top_k=6, weights=(("kind", 10.0), ("toxic", -20.0)))
    row = engine.add(request, [5, 6, 7], [])
    before = logits(1)
    after = before.clone()
    engine.apply(after, {0: row})
    best = before[0].topk(6).indices
    kind = library(classifiers["kind"], [5, 6, 7], before[0], k=6, beta=10.0)[best]
    toxic = library(classifiers["toxic"], [5, 6, 7], before[0], k=6, beta=20.0, invert=True)[best]
    assert torch.allclose(after[0, best], kind + toxic - before[0, best], atol=1e-4)


def test_several_requests_with_shared_and_different_models_in_one_step():
    classifiers = models()
    engine = engine_of(classifiers)
    requests = [
        RADRequest(3.0, top_k=4),
        RADRequest(1.0, top_k=4, weights=(("toxic", -2.0), ("kind", 1.0))),
        RADRequest(5.0, top_k=7, reward_model="toxic"),
    ]
    rows = {place: engine.add(request, [place + 3, 4], []) for place, request in enumerate(requests)}
    before = logits(3)
    together = before.clone()
    engine.apply(together, rows)
    for place, request in enumerate(requests):
        alone = before.clone()
        other = engine_of(classifiers)
        other.apply(alone, {place: other.add(request, [place + 3, 4], [])})
        assert torch.allclose(together[place], alone[place], atol=1e-4)


def test_tokens_outside_the_reward_models_vocabulary_are_no_candidates():
    engine = engine_of(models())
    before = torch.randn(1, VOCAB + 8)
    before[0, VOCAB:] = 50.0
    after = before.clone()
    engine.apply(after, {0: engine.add(RADRequest(2.0, top_k=5), [3], [])})
    assert torch.equal(after[0].isfinite().nonzero()[:, 0], before[0, :VOCAB].topk(5).indices.sort().values)


@pytest.mark.parametrize(
    ("request_", "prompt", "outputs", "message"),
    [
        (RADRequest(1.0, reward_model="kid"), [3], [], "unknown reward model 'kid'; the engine's reward models are"),
        (RADRequest(1.0, top_k=1000), [3], [], "rad_top_k is 1000, but this engine allows at most 256"),
        (RADRequest(1.0, score_index=1), [3], [], "rad_score_index is 1, but reward model 'kind' has 1 output columns"),
        (RADRequest(1.0), None, [], "a prompt without token ids"),
        (RADRequest(1.0), [3, VOCAB], [], "token id 48, but the reward model knows ids 0 to 47"),
        (RADRequest(1.0), [3], [-1], "holds token id -1"),
        (RADRequest(1.0), [4] * 300, [], None),
    ],
)
def test_a_request_that_cannot_be_steered_is_ended_and_others_go_on(request_, prompt, outputs, message, caplog):
    """The last case is longer than the reward model reads (64), which is no fault."""
    engine = engine_of(models())
    good = engine.add(RADRequest(2.0, top_k=5, trace="good"), [3, 4], [])
    bad = engine.add(request_, prompt, outputs, stop_ids=(2,))
    before = logits(2)
    after = before.clone()
    engine.apply(after, {0: good, 1: bad})
    assert int(after[0].isfinite().sum()) == 5
    if message is None:
        assert bad.error is None
        return
    assert message in bad.error
    assert message in caplog.text
    assert after[1].isfinite().nonzero().tolist() == [[2]]
    assert engine.statistics()["failed_requests"] == 1


def test_nan_rewards_end_their_request_only():
    classifiers = models()
    engine = engine_of(classifiers)
    with torch.no_grad():
        classifiers["toxic"].score.weight.fill_(float("nan"))
    for scorer in engine.scorers.values():
        scorer.verify = False
    good = engine.add(RADRequest(2.0, top_k=5), [3, 4], [])
    bad = engine.add(RADRequest(2.0, top_k=5, reward_model="toxic", trace="bad"), [3, 4], [], stop_ids=(2,))
    after = logits(2)
    engine.apply(after, {0: good, 1: bad})
    assert int(after[0].isfinite().sum()) == 5
    assert after[1].isfinite().nonzero().tolist() == [[2]]
    (trace,) = engine.traces.take("bad")
    assert "the reward is NaN after 2 tokens, candidate token" in trace["error"]


def test_full_cache_by_configuration():
    for when_full, fails in (("error", True), ("wait", False)):
        classifiers = models()
        engine = engine_of(classifiers, when_full=when_full)
        for scorer in engine.scorers.values():
            scorer.pool.allocate(15)  # 1 of 16 blocks is left
        small = engine.add(RADRequest(2.0, top_k=3), [3] * 10, [])
        large = engine.add(RADRequest(2.0, top_k=3), [4] * 40, [], stop_ids=(2,))
        before = logits(2)
        after = before.clone()
        engine.apply(after, {0: small, 1: large})
        assert small.error is None
        assert (large.error is not None) == fails
        if fails:
            assert "no room for 40 tokens in the cache of 256 of 'kind'" in large.error
        else:
            want = library(classifiers["kind"], [4] * 40, before[1], k=3, beta=2.0)
            assert torch.allclose(after[1], want, atol=1e-4)


def test_changed_outputs_are_scored_anew():
    """An engine that takes tokens back and goes on with others (verify=True compares every score)."""
    engine = engine_of(models())
    outputs = [5, 6, 7]
    row = engine.add(RADRequest(2.0, top_k=3), [3] * 30, outputs)
    engine.apply(logits(1), {0: row})
    outputs[1:] = [9, 10]
    engine.apply(logits(1, 1), {0: row})
    assert row.tokens == [3] * 30 + [5, 9, 10]


def test_removed_requests_give_their_blocks_back():
    engine = engine_of(models())
    rows = {
        place: engine.add(RADRequest(1.0, top_k=3, weights=(("kind", 1.0), ("toxic", 1.0))), [place + 3] * 20, [])
        for place in range(3)
    }
    engine.apply(logits(3), rows)
    used = [model["cache_tokens_used"] for model in engine.statistics()["reward_models"].values()]
    assert used == [3 * 2 * BLOCK] * 2
    for row in rows.values():
        engine.remove(row)
    assert [scorer.pool.used for scorer in engine.scorers.values()] == [0, 0]


def test_placeholder_that_is_replaced_before_the_step_is_no_fault():
    """Asynchronous scheduling: the newest token is -1 when the batch is updated and known when logits are shifted."""
    engine = engine_of(models())
    outputs = [5, -1]
    row = engine.add(RADRequest(2.0, top_k=3), [3, 4], outputs)
    outputs[1:] = [9]
    engine.apply(logits(1), {0: row})
    assert row.error is None
    assert row.tokens == [3, 4, 5, 9]


def test_trace_has_every_step_and_survives_preemption():
    engine = engine_of(models())
    request = RADRequest(2.0, top_k=4, trace="t", weights=(("kind", 1.0), ("toxic", -1.0)))
    outputs: list[int] = []
    row = engine.add(request, [3, 4], outputs)
    for step in range(5):
        after = logits(1, step)
        engine.apply(after, {0: row})
        if step == 1:  # thrown away by the engine (chunked prefill), and repeated with other logits
            after = logits(1, 77)
            engine.apply(after, {0: row})
        outputs.append(int(after[0].argmax()))
        if step == 2:
            engine.remove(row)
            outputs = list(outputs)
            row = engine.add(request, [3, 4], outputs)
    sibling = engine.add(request, [3, 4], [])
    engine.apply(logits(1, 9), {0: sibling})
    traces = engine.traces.take("t")
    assert engine.traces.take("t") == []
    assert len(traces) == 2
    trace = trace_of(traces, outputs)
    assert trace["tokens"] == outputs
    assert len(trace["steps"]) == 5
    rewards = token_rewards(trace, outputs)
    assert all(set(reward) == set(NAMES) and all(0 < value < 1 for value in reward.values()) for reward in rewards)
    for step in trace["steps"]:
        shift = [2.0 * (kind + 1 - toxic) for kind, toxic in zip(*step["rewards"].values(), strict=True)]
        assert step["shift"] == pytest.approx(shift, abs=1e-5)
    assert engine.requests == 2
    assert token_rewards(trace, [*outputs, 1])[-1] is None


@pytest.mark.parametrize("beta", [0.5, 3.0, 40.0])
def test_greedy_rows_get_the_same_tokens_without_scoring_candidates_that_cannot_win(beta):
    """Two rows of different length and kind beside a sampled one; the least gain is pushed up, so guesses fail too."""
    classifiers = models()
    requests = [
        RADRequest(beta, top_k=12),
        RADRequest(1.0, top_k=12, weights=(("kind", beta), ("toxic", -beta))),
        RADRequest(beta, top_k=7, invert=True),
    ]
    tokens, ruled_out, scored = {}, {}, {}
    for is_greedy in (False, True):
        engine = engine_of(classifiers)
        outputs = [[] for _ in requests]
        rows = {
            place: engine.add(request, [place + 3] * (4 + place), outputs[place], is_greedy=is_greedy and place < 2)
            for place, request in enumerate(requests)
        }
        for step in range(20):
            after = 2 * logits(3, step)
            if step % 5 == 4:
                for row in rows.values():
                    row.least_gain = 1.0  # no candidate gains all that it could: the second forward must repair it
            engine.apply(after, rows)
            for place, output in enumerate(outputs):
                output.append(int(after[place].argmax()))
                assert int(after[place].isfinite().sum()) >= 1
        tokens[is_greedy], ruled_out[is_greedy] = outputs, engine.ruled_out_candidates
        scored[is_greedy] = [engine.scorers[name].statistics for name in NAMES]
    assert tokens[True] == tokens[False]
    assert ruled_out[False] == 0
    if beta == 3.0:
        assert ruled_out[True] > 50
        assert scored[True][0].forwards > scored[False][0].forwards == 20, "no guess failed"
        assert scored[True][0].candidate_tokens == scored[False][0].candidate_tokens - ruled_out[True]
    assert [s.prefix_tokens for s in scored[True]] == [s.prefix_tokens for s in scored[False]], "an entry was lost"
