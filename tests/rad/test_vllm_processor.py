"""RAD inside the real vLLM on CPU: same tokens as `generate()`, right scores whatever the scheduler does."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ebft.rad import CachedRewardModelValue, ValueGuidedProcessor, load_sequence_classifier
from openrlhf_ebft.rad.engine.trace import token_rewards, trace_of
from tests.rad.vllm_setup import MAX_LEN, rad_of, save_models, start
from tests.tiny_models import VOCAB

pytestmark = pytest.mark.stack
PROMPTS = [
    [3 + (7 * i + 11 * p) % 60 for i in range(length)] for p, length in enumerate((4, 33, 70, 12, 50, 64, 5, 41))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rad-vllm")


@pytest.fixture(scope="module")
def lm(folder):
    return save_models(folder)


@pytest.fixture(scope="module")
def llm(folder, lm):
    """12 blocks of 32 tokens for 8 requests of up to 128: it preempts; prompts in chunks; every score verified.

    The scheduler runs ahead of the tokens, the harder of its two ways; the server's tests have the other one.
    """
    engine = start(
        folder,
        is_asynchronous=True,
        num_gpu_blocks_override=12,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()


def params(new=40, **rad):
    from vllm import SamplingParams

    extra = {f"rad_{name}": value for name, value in rad.items()}
    return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, extra_args=extra or None)


def run(llm, prompts, parameters):
    with torch.compiler.set_stance("force_eager"):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def by_generate(lm, folder, prompt, new=40, name="kind", **arguments):
    """Greedy tokens of `generate()` with the library's processor."""
    ids = torch.tensor([prompt])
    processors = []
    if arguments:
        model, tokenizer = load_sequence_classifier(folder / name)
        column = {"score_index": 1} if name == "toxic" else {}
        value = CachedRewardModelValue(model, tokenizer, score_transform="sigmoid", **column)
        processors = [
            ValueGuidedProcessor(
                value, normalize="clamp", prompt_ids=ids, attention_mask=torch.ones_like(ids), **arguments
            )
        ]
    out = lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=-1,
        logits_processor=processors,
    )
    return out[0, len(prompt) :].tolist()


def settings():
    """What each prompt is generated with: arguments here, and the same for the library."""
    rest = [
        ({}, {}),
        ({"beta": 20.0, "top_k": 20, "reward_model": "toxic"}, {"beta": 20.0, "k": 20, "name": "toxic"}),
        ({"beta": 15.0, "top_k": 5, "invert": True}, {"beta": 15.0, "k": 5, "invert": True}),
    ]
    weak = ({"beta": 0.5, "top_k": 20}, {"beta": 0.5, "k": 20})  # most candidates cannot win and are not scored
    return [({"beta": 10.0, "top_k": 5}, {"beta": 10.0, "k": 5}), *rest, weak, *rest]


def test_greedy_equals_generate_while_requests_are_chunked_preempted_and_resumed(llm, lm, folder, monkeypatch):
    rad = rad_of(llm)
    resumed, add = [], rad.add

    def counted(request, prompt, outputs, stop_ids=(), **more):
        resumed.extend([1] if outputs else [])
        return add(request, prompt, outputs, stop_ids, **more)

    monkeypatch.setattr(rad, "add", counted)
    plan = settings()
    got = run(llm, PROMPTS, [params(**mine) for mine, _ in plan])
    assert resumed, "no steered request was preempted: the cache is not small enough for this test"
    for prompt, (mine, theirs), (tokens,) in zip(PROMPTS, plan, got, strict=True):
        assert tokens == by_generate(lm, folder, prompt, **theirs), mine
    assert len({tuple(tokens) for (tokens,) in got}) == len(got)
    run(llm, [PROMPTS[0]], [params(new=1)])  # a worker hears of a finished request with the next one's step
    statistics = llm.collective_rpc("rad_statistics")[0]
    assert statistics["failed_requests"] == 0
    assert statistics["ruled_out_candidates"] > 100
    assert [model["cache_tokens_used"] for model in statistics["reward_models"].values()] == [0, 0]
    assert statistics["reward_models"]["kind"]["rows_without_room"] == 0


def test_steering_changes_the_text_and_zero_strength_does_not(llm, lm, folder):
    (plain,), (weak,), (strong,) = run(llm, [PROMPTS[0]] * 3, [params(), params(beta=0.0), params(beta=10.0, top_k=5)])
    assert plain == weak == by_generate(lm, folder, PROMPTS[0])
    assert strong != plain


def test_several_samples_of_a_prompt_and_traces(llm):
    from vllm import SamplingParams

    extra = {"rad_weights": ["kind=4", "toxic=-6"], "rad_top_k": 6, "rad_trace": "n3"}
    sampled = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, ignore_eos=True, extra_args=extra)
    ((one, two, three),) = run(llm, [PROMPTS[1]], [sampled])
    assert len({tuple(one), tuple(two), tuple(three)}) == 3
    (traces,) = llm.collective_rpc("rad_take_trace", args=("n3",))
    assert len(traces) == 3
    for tokens in (one, two, three):
        rewards = token_rewards(trace_of(traces, tokens), tokens)
        assert len(rewards) == 9
        assert all(set(reward) == {"kind", "toxic"} for reward in rewards)
    assert llm.collective_rpc("rad_take_trace", args=("n3",)) == [[]]


def test_aborted_requests_leave_nothing_behind_and_do_not_touch_others(llm, lm, folder):
    engine = llm.llm_engine
    for number, prompt in enumerate(PROMPTS[:6]):
        engine.add_request(f"abort-{number}", {"prompt_token_ids": prompt}, params(beta=10.0, top_k=5))
    finished = {}
    with torch.compiler.set_stance("force_eager"):
        for step in range(400):
            if step in (4, 12):
                gone = [name for name in engine.output_processor.request_states if name.startswith(f"abort-{step % 3}")]
                engine.abort_request(gone, internal=True)
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            if not engine.has_unfinished_requests():
                break
    assert len(finished) == 4
    for name, tokens in finished.items():
        prompt = PROMPTS[int(name.removeprefix("abort-"))]
        assert tokens == by_generate(lm, folder, prompt, beta=10.0, k=5)
    run(llm, [PROMPTS[0]], [params(new=1)])
    assert [scorer.pool.used for scorer in rad_of(llm).scorers.values()] == [0, 0]


def test_first_token_follows_the_steered_distribution(llm, lm, folder, monkeypatch):
    """Chi-square over the candidates at 4000 draws; the limit is the 99.9% quantile for their number."""
    from vllm import SamplingParams

    monkeypatch.setattr(rad_of(llm).scorers["kind"], "verify", False)  # the same step 4000 times
    k, beta, draws = 6, 3.0, 4000
    extra = {"rad_beta": beta, "rad_top_k": k}
    sampled = SamplingParams(temperature=0.8, seed=1, n=draws, max_tokens=1, ignore_eos=True, extra_args=extra)
    (samples,) = run(llm, [PROMPTS[3]], [sampled])
    model, tokenizer = load_sequence_classifier(folder / "kind")
    value = CachedRewardModelValue(model, tokenizer, score_transform="sigmoid")
    ids = torch.tensor([PROMPTS[3]])
    processor = ValueGuidedProcessor(value, k=k, beta=beta, normalize="clamp")
    with torch.no_grad():
        wanted = (processor(ids, lm(ids).logits[:, -1]) / 0.8).softmax(-1)[0]
    counts = torch.tensor([tokens[0] for tokens in samples]).bincount(minlength=VOCAB)
    possible = wanted > 0
    assert int(possible.sum()) == k
    assert counts[~possible].sum() == 0
    expected = wanted[possible] * draws
    assert expected.min() > 5
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rad_beta": -1.0}, "rad_beta must be >= 0"),
        ({"rad_beta": 1.0, "rad_reward_model": "kid"}, "unknown reward model 'kid'"),
        ({"rad_bета": 1.0}, "unknown RAD argument"),
    ],
)
def test_wrong_arguments_are_refused_for_that_request_alone(llm, extra, message):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=message):
        run(llm, [PROMPTS[0]], [SamplingParams(max_tokens=3, extra_args=extra)])
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(run(llm, [PROMPTS[0]], [params(new=3, beta=1.0)])[0][0]) == 3


def test_prompt_and_response_up_to_the_engines_limit(llm, lm, folder):
    prompt = (PROMPTS[5] * 2)[: MAX_LEN - 10]
    ((tokens,),) = run(llm, [prompt], [params(new=10, beta=10.0, top_k=5)])
    assert tokens == by_generate(lm, folder, prompt, new=10, beta=10.0, k=5)
