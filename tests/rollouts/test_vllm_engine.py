"""Sampling through the real vLLM on CPU: what comes back equals what transformers computes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.core.seeding import completion_seed
from openrlhf_ebft.rollouts.engine import build_engine
from tests.rollouts.requests import GREEDY, SAMPLED, request, token_logprobs
from tests.rollouts.vllm_engines import start
from tests.tiny_models import VOCAB, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.stack
MAX_LEN = 96
PROMPT = list(range(3, 45))


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """A model and an engine on its folder, which has no tokenizer and a generation config that must not leak."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_llama(folder)
    path = folder / "generation_config.json"
    leak = {"do_sample": True, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.5, "eos_token_id": list(range(3, 40))}
    path.write_text(json.dumps(json.loads(path.read_text()) | leak))
    engine = start(folder)
    yield model, engine
    engine.shutdown()


def completions(engine, *requests, sampling=None):
    return [rollout.completions for rollout in engine.generate(list(requests), sampling)]


def test_order_counts_and_logprobs_equal_the_trainers(setup):
    model, engine = setup
    requests = [
        request(PROMPT, [10, 33, 42], n=4, name="strided"),
        request([9, 8, 7], [3], n=2, new=20, name="short"),
    ]
    rollouts = engine.generate(requests)
    assert [rollout.example_id for rollout in rollouts] == ["strided", "short"]
    assert [[len(group) for group in rollout.completions] for rollout in rollouts] == [[4, 4, 4], [2]]
    for asked, rollout in zip(requests, rollouts, strict=True):
        tokens = asked.reference.token_ids.tolist()
        for anchor, group in zip(asked.reference.anchors.tolist(), rollout.completions, strict=True):
            for sample in group:
                wanted = token_logprobs(model, tokens[:anchor] + list(sample.token_ids), 0.7)[anchor - 1 :]
                assert torch.allclose(torch.tensor(sample.logprobs), wanted, atol=5e-5)


def test_generation_config_of_the_folder_does_not_leak(setup):
    model, engine = setup
    plain = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=())
    ((group,),) = completions(engine, request(PROMPT, [42], n=8, new=30), sampling=plain)
    assert all(len(sample.token_ids) == 30 for sample in group)  # the folder's 37 "EOS" tokens do not stop it
    for sample in group:
        wanted = token_logprobs(model, PROMPT + list(sample.token_ids))[len(PROMPT) - 1 :]
        assert torch.allclose(torch.tensor(sample.logprobs), wanted, atol=2e-5)
    settings = engine.effective_settings()
    assert settings["sampling/top_k"] == 0
    assert settings["sampling/top_p"] == 1.0
    assert settings["sampling/repetition_penalty"] == 1.0
    assert settings["sampling/stop_token_ids"] == [1]
    assert settings["sampling/temperature"] == 0.7
    json.dumps(settings)


def test_seeds_repeat_and_do_not_depend_on_the_batch(setup):
    _, engine = setup
    first = completions(engine, request(PROMPT, [20, 42], n=3), request(PROMPT[::-1], [30], n=3))
    assert completions(engine, request(PROMPT, [20, 42], n=3), request(PROMPT[::-1], [30], n=3)) == first
    alone = completions(engine, request(PROMPT, [20, 42], n=3))
    assert [[s.token_ids for s in group] for group in alone[0]] == [[s.token_ids for s in group] for group in first[0]]
    assert completions(engine, request(PROMPT, [20, 42], n=3, seed=6)) != alone
    assert len({sample.token_ids for sample in first[0][0]}) == 3


def test_sample_s_draws_from_its_own_seed(setup):
    _, engine = setup
    ((group,),) = completions(engine, request(PROMPT, [42], n=3, seed=11))
    for index, sample in enumerate(group):
        params = {"seed": completion_seed(11, 0, index), "n": 1, "temperature": 0.7, "max_tokens": 8}
        from vllm import SamplingParams

        direct = engine._llm.generate(
            [{"prompt_token_ids": PROMPT}],
            [SamplingParams(**params, stop_token_ids=[1], detokenize=False, ignore_eos=True)],
            use_tqdm=False,
        )
        assert tuple(direct[0].outputs[0].token_ids) == sample.token_ids


def test_greedy_equals_plain_generate(setup):
    model, engine = setup
    ((group,),) = completions(engine, request(PROMPT, [42], n=2, new=12), sampling=GREEDY)
    ids = torch.tensor([PROMPT])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=-1
    )
    assert group[0].token_ids == tuple(wanted[0, len(PROMPT) :].tolist())
    assert group[0] == group[1]
    logprobs = token_logprobs(model, PROMPT + list(group[0].token_ids))[len(PROMPT) - 1 :]
    assert torch.allclose(torch.tensor(group[0].logprobs), logprobs, atol=2e-5)


def test_top_k_logprobs_are_renormalised_over_the_kept_tokens(setup):
    model, engine = setup
    ((group,),) = completions(engine, request(PROMPT, [42], n=6, new=1), sampling=dataclasses.replace(SAMPLED, top_k=3))
    with torch.no_grad():
        top = (model(torch.tensor([PROMPT])).logits[0, -1] / 0.7).topk(3)
    kept = dict(zip(top.indices.tolist(), top.values.log_softmax(0).tolist(), strict=True))
    for sample in group:
        assert sample.logprobs[0] == pytest.approx(kept[sample.token_ids[0]], abs=2e-5)


def test_stop_tokens_and_truncation(setup):
    """Limit 4: stop token as 4th of 4 and as 3rd (with 1 to spare), and none at all; nothing appended or removed."""
    _, engine = setup
    ((free,),) = completions(engine, request(PROMPT, [42], new=4, seed=3), sampling=GREEDY)
    ids = free[0].token_ids
    assert len(set(ids)) == 4  # otherwise the stop token below would come earlier
    for position, reason in ((2, "stop"), (3, "stop")):
        stopping = dataclasses.replace(GREEDY, stop_token_ids=(ids[position],))
        ((group,),) = completions(engine, request(PROMPT, [42], new=4), sampling=stopping)
        assert group[0].token_ids == ids[: position + 1]
        assert group[0].finish_reason == reason
    assert free[0].finish_reason == "length"


def test_completion_that_is_only_the_stop_token_is_kept(setup):
    _, engine = setup
    ((free,),) = completions(engine, request(PROMPT, [42], new=1), sampling=GREEDY)
    stopping = dataclasses.replace(GREEDY, stop_token_ids=free[0].token_ids)
    ((group,),) = completions(engine, request(PROMPT, [42], new=9), sampling=stopping)
    assert group[0].token_ids == free[0].token_ids
    assert len(group[0].logprobs) == 1
    assert group[0].finish_reason == "stop"


def test_token_ids_are_taken_as_they_are(setup, tmp_path):
    """ "he" + "llo" stays two tokens though "hello" is one: nothing between trainer and engine re-tokenises."""
    model, engine = setup
    tokenizer = tiny_tokenizer(tmp_path)
    two, one = tokenizer.convert_tokens_to_ids(["he", "llo"]), tokenizer("hello")["input_ids"]
    assert (len(two), len(one)) == (2, 1)
    prompts = [PROMPT[:9] + two, PROMPT[:9] + one]
    groups = completions(engine, *(request(prompt, [len(prompt)]) for prompt in prompts))
    for prompt, ((sample,),) in zip(prompts, groups, strict=True):
        wanted = token_logprobs(model, prompt + list(sample.token_ids), 0.7)[len(prompt) - 1 :]
        assert torch.allclose(torch.tensor(sample.logprobs), wanted, atol=5e-5)
    assert groups[0][0][0].logprobs[0] != groups[1][0][0].logprobs[0]


def test_nested_prefixes_come_from_the_cache(setup):
    _, engine = setup
    tokens = [5 + (7 * i) % 50 for i in range(80)]
    engine.generate([request(tokens, [70])])
    (again,) = engine.generate([request(tokens, [70, 80])])
    assert again.cached_tokens == 2 * 64  # two full blocks of 32 each time
    engine.forget_prefixes()
    (fresh,) = engine.generate([request(tokens, [70])])
    assert fresh.cached_tokens == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(PROMPT, [20, 42], new=55, name="too-long"), r"'too-long', anchor 1: 42 prompt tokens \+ 55 new.*96"),
        (request(PROMPT, [0], name="empty"), r"'empty', anchor 0: the prompt is empty"),
        (request([3, VOCAB, 4], [3], name="big"), r"'big', anchor 0: token id 64 at position 1 .* vocabulary of 64"),
        (request([3, -1, 4], [3], name="neg"), r"'neg', anchor 0: token id -1 at position 1"),
        (request(PROMPT, [42], new=0, name="none"), r"'none', anchor 0: max_new_tokens must be at least 1, got 0"),
    ],
)
def test_bad_requests_name_the_example_and_nothing_is_sampled(setup, bad, message):
    _, engine = setup
    with pytest.raises(ValueError, match=message):
        engine.generate([request(PROMPT, [42]), bad])
    assert not engine._llm.llm_engine.has_unfinished_requests()


def test_prompt_and_completion_may_fill_the_limit_exactly(setup):
    _, engine = setup
    ((group,),) = completions(engine, request(PROMPT, [42], new=MAX_LEN - 42), sampling=GREEDY)
    assert len(group[0].token_ids) == MAX_LEN - 42


def test_failure_in_the_engine_is_raised_and_leaves_nothing_behind(setup, monkeypatch):
    _, engine = setup
    asked = [request(PROMPT, [42], n=3), request(PROMPT[5:], [20], n=2)]
    wanted = completions(engine, *asked)
    runner = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    real, calls = runner.execute_model, []

    def fail_on_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "execute_model", fail_on_third)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.generate(asked)
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert completions(engine, *asked) == wanted
    assert engine._llm.reset_prefix_cache()


def test_score_equals_transformers(setup):
    model, engine = setup
    sequences = [PROMPT, [3, 9, 8], [40] * 70, [7]]
    for sequence, scores in zip(sequences, engine.score(sequences), strict=True):
        assert len(scores) == len(sequence) - 1
        if scores:
            assert torch.allclose(torch.tensor(scores), token_logprobs(model, sequence), atol=2e-5)
    with pytest.raises(ValueError, match="sequence 1 has 96 tokens; the engine scores 1 to 95"):
        engine.score([[3, 4], [3] * 96])


def test_empty_list_gives_an_empty_list(setup):
    assert setup[1].generate([]) == []


def test_second_engine_in_a_process_is_refused(setup, tmp_path):
    with pytest.raises(RuntimeError, match="one vLLM engine"):
        start(tmp_path)


def test_transformers_engine_gives_the_same_greedy_tokens_and_scores(setup, tmp_path):
    model, engine = setup
    model.save_pretrained(tmp_path)
    plain = build_engine(
        str(tmp_path),
        RolloutConfig(engine="transformers"),
        SAMPLED,
        dtype="float32",
        max_model_len=MAX_LEN,
        seed=0,
        threads=1,
    )
    asked = [request(PROMPT, [5, 20, 42], n=2, new=24), request(PROMPT[::-1], [30], new=10)]
    for one, other in zip(engine.generate(asked, GREEDY), plain.generate(asked, GREEDY), strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert [c.token_ids for c in mine] == [c.token_ids for c in theirs]
            assert mine[0].logprobs == pytest.approx(theirs[0].logprobs, abs=5e-5)
    assert engine.score([PROMPT])[0] == pytest.approx(plain.score([PROMPT])[0], abs=5e-5)


def test_samples_follow_the_models_distribution(setup):
    """4000 single-token samples of one anchor; shares within 5 standard errors of the exact probabilities."""
    model, engine = setup
    ((group,),) = completions(engine, request(PROMPT, [42], n=4000, new=1))
    with torch.no_grad():
        wanted = (model(torch.tensor([PROMPT])).logits[0, -1] / 0.7).softmax(-1)
    shares = torch.tensor([sample.token_ids[0] for sample in group]).bincount(minlength=VOCAB) / len(group)
    assert ((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / len(group)).sqrt() + 1e-3).all()
