"""The RAD control inside transformers' generate(), with every score checked against a full forward (verify=True)."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf_ebft.rad import RAD, CachedRewardModelValue, ModelAccess, RADArgs, ValueGuidedProcessor
from openrlhf_ebft.rad.protocol import Capability
from tests.rad.conftest import (
    VOCAB,
    configs,
    encoder_configs,
    make_classifier,
    make_lm,
    make_tokenizer,
    save_classifier,
)

PROMPTS = torch.tensor([[1, 1, 3, 4, 5], [6, 7, 8, 9, 10]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture
def lm():
    return make_lm(configs()["llama"])


def steered(folder: str, lm, tokenizer, **arguments) -> RAD:
    rad = RAD(
        **{"beta": 8.0, "top_k": 6, "score_transform": "sigmoid", "verify": True, **arguments}, reward_model_id=folder
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rad.steer(lm, tokenizer)
    return rad


def generate(rad: RAD, lm, ids=PROMPTS, mask=MASK, trace=None, **arguments):
    processors = rad.get_logits_processors(ids, {"value_trace": trace}, attention_mask=mask)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1, "eos_token_id": 2, **arguments}
    return lm.generate(ids, attention_mask=mask, logits_processor=processors, **settings)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gpt_neox", "qwen2", "gemma2"])
def test_every_decoding_mode_on_left_padded_batches(name, tmp_path, lm, tokenizer):
    """verify=True raises inside generate() if any cached score is off by more than 1e-5."""
    rad = steered(save_classifier(tmp_path, configs()[name]), lm, tokenizer)
    assert rad.scoring_path == "cached" and rad.supports_batching
    torch.manual_seed(0)
    for mode in (
        {},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
    ):
        trace: list = []
        out = generate(rad, lm, trace=trace, **mode)
        assert out.size(1) > PROMPTS.size(1)
        assert len(trace) >= out.size(1) - PROMPTS.size(1)


@pytest.mark.parametrize("efficient", [True, False])
def test_greedy_texts_are_the_same_when_losing_candidates_are_not_scored(efficient, llama_reward, lm, tokenizer):
    """With few and with all candidates scored; verify=True compares every score that was needed."""
    for beta in (0.3, 8.0):
        arguments = {"beta": beta, "top_k": 20, "efficient": efficient, "verify": efficient}
        rads = [steered(llama_reward, lm, tokenizer, best_only=flag, **arguments) for flag in (False, True)]
        whole, best = (generate(rad, lm, max_new_tokens=12) for rad in rads)
        assert torch.equal(whole, best)
    probabilities = [rad.compute_logprobs(lm, PROMPTS, whole[:, -3:], attention_mask=MASK) for rad in rads]
    torch.testing.assert_close(*probabilities)


@pytest.mark.parametrize("do_sample", [False, True])
def test_cached_and_stateless_generate_the_same(do_sample, llama_reward, lm, tokenizer):
    outputs = []
    for efficient in (True, False):
        rad = steered(llama_reward, lm, tokenizer, efficient=efficient)
        torch.manual_seed(7)
        outputs.append(generate(rad, lm, do_sample=do_sample, max_new_tokens=16))
    assert torch.equal(*outputs)


def test_rows_that_finish_early(llama_reward, lm, tokenizer):
    """Row 0 ends at once and is padded with pad != EOS while row 1 goes on."""
    rad = steered(llama_reward, lm, tokenizer)
    first = int(generate(rad, lm)[0, 5])
    trace: list = []
    out = generate(rad, lm, trace=trace, eos_token_id=first, max_new_tokens=6)
    assert out[0, 6:].eq(1).all() and len(trace) == out.size(1) - 5


def test_beta_steers_and_invert_steers_back(llama_reward, lm, tokenizer):
    def reward(**arguments) -> float:
        trace: list = []
        rad = steered(llama_reward, lm, tokenizer, top_k=20, **arguments)
        torch.manual_seed(1)
        out = generate(
            rad, lm, trace=trace, do_sample=True, num_return_sequences=8, max_new_tokens=6, eos_token_id=None
        )
        chosen = [
            record.values[record.candidate_ids == out[:, 5 + step, None].cpu()] for step, record in enumerate(trace)
        ]
        return float(torch.cat(chosen).mean())

    up, none, down = reward(beta=40.0), reward(beta=0.0), reward(beta=40.0, invert=True)
    assert up > none + 0.1 and down < none - 0.1


def test_assisted_decoding_rewinds(llama_reward, lm, tokenizer):
    """The assistant proposes tokens of which some are rejected; greedy output is that of ordinary decoding."""
    rad = steered(llama_reward, lm, tokenizer)
    plain = generate(rad, lm, PROMPTS[1:], MASK[1:])
    assistant = make_lm(configs()["llama"], seed=9)
    assert torch.equal(generate(rad, lm, PROMPTS[1:], MASK[1:], assistant_model=assistant), plain)


def test_one_processor_for_two_prompts(llama_reward, lm, tokenizer):
    """A processor that has seen another prompt gives what a fresh one gives."""
    rad = steered(llama_reward, lm, tokenizer)
    processors = rad.get_logits_processors(PROMPTS, {}, attention_mask=MASK)
    for ids in (PROMPTS, PROMPTS[1:], torch.tensor([[1, 20, 21], [22, 23, 24]])):
        mask = (ids != 1).long()
        settings = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
        again = lm.generate(ids, logits_processor=processors, **settings)
        fresh = rad.get_logits_processors(ids, {}, attention_mask=mask)
        assert torch.equal(again, lm.generate(ids, logits_processor=fresh, **settings))


def test_concurrent_generate_calls(llama_reward, lm, tokenizer):
    rad = steered(llama_reward, lm, tokenizer)
    alone = [generate(rad, lm, PROMPTS[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    results: dict[int, torch.Tensor] = {}

    def call(index: int) -> None:
        row = index % 2
        results[index] = generate(rad.clone_for_call(seed=index), lm, PROMPTS[row : row + 1], MASK[row : row + 1])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], alone[index % 2]) for index in range(4))


def test_padded_vocabulary(tmp_path, tokenizer):
    """The language model's logits are wider than the reward model's table."""
    config = configs()["llama"]
    config.vocab_size = VOCAB + 16
    wide = make_lm(config)
    rad = steered(save_classifier(tmp_path, configs()["gpt2"]), wide, tokenizer, top_k=VOCAB + 16)
    assert int(generate(rad, wide, do_sample=True).max()) < VOCAB


def test_prompt_longer_than_the_reward_model_reads(tmp_path, lm, tokenizer):
    config = configs()["gpt2"]
    config.n_positions = 8
    rad = steered(save_classifier(tmp_path, config), lm, tokenizer)
    assert rad.scoring_path == "cached"
    assert generate(rad, lm, max_new_tokens=6).size(1) == 11


@pytest.mark.parametrize("name", sorted(encoder_configs()))
def test_encoder_reward_model_warns_once(name, tmp_path, lm, tokenizer):
    rad = RAD(beta=1.0, reward_model_id=save_classifier(tmp_path, encoder_configs()[name]))
    with pytest.warns(UserWarning, match="not decoder-only.*stateless path") as caught:
        rad.steer(lm, tokenizer)
    assert len(caught) == 1 and rad.scoring_path == "stateless"
    generate(rad, lm)


def test_other_vocabulary_goes_through_text(tmp_path, lm, tokenizer):
    other = make_tokenizer(words=40)
    folder = save_classifier(tmp_path, configs()["llama"], tokenizer=other)
    rad = RAD(beta=1.0, reward_model_id=folder)
    with pytest.warns(UserWarning, match="vocabulary differs.*text path") as caught:
        rad.steer(lm, tokenizer)
    assert len(caught) == 1 and rad.scoring_path == "text"
    generate(rad, lm)
    assert steered(folder, lm, tokenizer, efficient=False).scoring_path == "text"


def test_failed_smoke_forward_warns_once(llama_reward, lm, tokenizer, monkeypatch):
    """A model that ignores the tree mask gives other scores, which the short probe finds."""
    from openrlhf_ebft.rad import tree_inputs

    monkeypatch.setattr(
        tree_inputs, "_additive", lambda allowed, dtype: torch.zeros(allowed.shape, dtype=dtype)[:, None]
    )
    rad = RAD(beta=1.0, reward_model_id=llama_reward)
    with pytest.warns(UserWarning, match="scores .* away from a full one.*stateless path") as caught:
        rad.steer(lm, tokenizer)
    assert len(caught) == 1 and rad.scoring_path == "stateless"


def test_compute_logprobs_equals_step_by_step(llama_reward, lm, tokenizer):
    rad = steered(llama_reward, lm, tokenizer, top_k=VOCAB)
    continuation = torch.tensor([[11, 12, 13], [14, 2, 15]])
    got = rad.compute_logprobs(lm, PROMPTS, continuation, attention_mask=MASK)
    reward = make_classifier(configs()["llama"])
    for row in range(2):
        prefix = PROMPTS[row][MASK[row] == 1].tolist()
        for column, token in enumerate(continuation[row].tolist()):
            with torch.no_grad():
                logits = lm(torch.tensor([prefix])).logits[0, -1].double()
                ids = torch.tensor([prefix + [v] for v in range(VOCAB)])
                rewards = reward.score(reward.model(ids)[0][:, -1])[:, 0].sigmoid().double()
            want = torch.log_softmax(logits + 8.0 * rewards, dim=0)[token]
            assert got[row, column].item() == pytest.approx(float(want), abs=1e-4)
            prefix.append(token)
    assert torch.equal(rad.compute_logprobs(lm, PROMPTS, continuation), got), "the mask is read from the pad tokens"
    right = PROMPTS.clone(), MASK.flip(1)
    right[0][0] = PROMPTS[0].roll(3)
    on_right = rad.compute_logprobs(lm, right[0], continuation, attention_mask=right[1])
    torch.testing.assert_close(on_right, got, atol=1e-4, rtol=0)
    off = RAD(beta=8.0, reward_model_id=llama_reward, include_in_scoring=False)
    plain = off.compute_logprobs(lm, PROMPTS[1:], continuation[1])
    with torch.no_grad():
        logits = lm(torch.cat([PROMPTS[1:], continuation[1:]], dim=1)).logits[0, 4:7].log_softmax(-1)
    torch.testing.assert_close(plain[0], logits.gather(1, continuation[1][:, None])[:, 0])


def test_tokens_outside_the_candidates_have_no_probability(llama_reward, lm, tokenizer):
    rad = steered(llama_reward, lm, tokenizer, top_k=1)
    with torch.no_grad():
        worst = lm(PROMPTS[1:]).logits[0, -1].argmin()
    assert rad.compute_logprobs(lm, PROMPTS[1:], worst[None]).item() == float("-inf")
    with pytest.raises(ValueError, match="prompt is empty"):
        rad.compute_logprobs(lm, PROMPTS[:, :0], PROMPTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": -1.0}, "beta must be finite and >= 0, got -1"),
        ({"beta": float("nan")}, "beta must be finite"),
        ({"beta": "x"}, "beta must be a number"),
        ({"beta": 1e39}, "beta must be at most 1e.30"),
        ({"beta": 10**400}, "beta must be at most 1e.30"),
        ({"top_k": 0}, "top_k must be a whole number >= 1, got 0"),
        ({"score_index": -1}, "score_index must be a whole number >= 0, got -1"),
        ({"score_transform": "tanh"}, "score_transform must be one of none, sigmoid, softmax, got 'tanh'"),
        ({"reward_model_id": ""}, "reward_model_id"),
        ({"invert": 1}, "invert must be True or False"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RAD(**{"beta": 1.0, "reward_model_id": "x", **arguments})


def test_missing_and_unknown_arguments():
    for arguments in ({"beta": 1.0}, {"reward_model_id": "x"}, {"beta": 1.0, "reward_model_id": "x", "topk": 3}):
        with pytest.raises(TypeError):
            RAD(**arguments)
    assert RAD(2.0, "x", {"dtype": "float32"}, 7).top_k == 7
    assert RAD(2.0, Path("a") / "b").export_processor_spec()["args"]["reward_model_id"] == "a/b"


def test_score_index_outside_the_reward_model(llama_reward, lm, tokenizer):
    with pytest.raises(ValueError, match="score_index 3 .* 1 output columns"):
        RAD(beta=1.0, reward_model_id=llama_reward, score_index=3).steer(lm, tokenizer)


def test_lifecycle(llama_reward, lm, tokenizer):
    rad = RAD(beta=1.0, reward_model_id=llama_reward)
    assert rad.scoring_path is None
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"RAD\.steer"):
            rad.get_logits_processors(PROMPTS, {})
        assert rad.steer(lm, tokenizer) is None
        first, second = (rad.get_logits_processors(PROMPTS, {})[0] for _ in range(2))
        with pytest.raises(ValueError, match="'value_trace'.* must be a list to append to, got tuple"):
            rad.get_logits_processors(PROMPTS, {"value_trace": ()})
        assert first is not second and first.value is not second.value
        assert isinstance(first, ValueGuidedProcessor) and isinstance(first.value, CachedRewardModelValue)
        assert first.value.reward_model is second.value.reward_model
        rad.cleanup()
        assert rad.scoring_path is None


def test_no_tokenizer_is_a_clear_error(llama_reward, lm):
    with pytest.raises(ValueError, match="pass tokenizer="):
        RAD(beta=1.0, reward_model_id=llama_reward).steer(lm)


def test_without_any_tokenizer_ids_are_shared(tmp_path, lm, tokenizer):
    make_classifier(configs()["gpt2"]).save_pretrained(tmp_path)
    rad = RAD(beta=1.0, reward_model_id=str(tmp_path), verify=True)
    rad.steer(lm)
    assert rad.scoring_path == "cached"
    generate(rad, lm)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        rad.steer(lm, tokenizer)


def test_tokenizer_saved_beside_the_model(llama_reward, lm, tokenizer, tmp_path):
    lm.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    rad = RAD(beta=1.0, reward_model_id=llama_reward)
    rad.steer(AutoModelForCausalLM.from_pretrained(tmp_path / "lm"))
    assert rad.scoring_path == "cached"


def test_protocol_values():
    names = "beta reward_model_id reward_model_kwargs top_k score_index score_transform invert efficient"
    assert list(inspect.signature(RAD).parameters)[:8] == names.split()
    rad = RAD(beta=2.0, reward_model_id="folder", reward_model_kwargs={"dtype": torch.bfloat16}, top_k=3)
    assert rad.enabled and not rad.same_model_forwards and rad.include_in_scoring
    assert rad.steer_access() is ModelAccess.MODULE
    assert rad.requirements().generate == rad.requirements().score == (Capability.IN_PROCESS_TORCH,)
    assert RAD(1.0, "x", include_in_scoring=False).requirements().score == ()
    assert rad.export_state() == {} and rad.steer_fits() == () and rad.fit_identity() is None
    assert rad.export_constraint() is None and rad.export_generation_params() is None
    assert rad.get_stopping_criteria(PROMPTS, {}) == []
    key, arguments = rad.frozen_form({})
    assert key == "output_control/rad" and RADArgs(**arguments) == rad.args
    spec = json.loads(json.dumps(rad.export_processor_spec()))
    assert spec["kind"] == "rad" and RAD(**spec["args"]).reward_model_kwargs == {"dtype": "bfloat16"}
    (entry,) = RAD.RUNTIME_KWARGS_SCHEMA
    assert entry["name"] == "value_trace" and entry["scope"] == "call"
    with pytest.raises(ValueError, match="exports no state"):
        rad.frozen_form({"x": 1})
    with pytest.raises(ValueError, match="no plain form"):
        RAD(1.0, "x", {"config": object()}).export_processor_spec()


def test_clone_has_its_own_settings(llama_reward, lm, tokenizer):
    rad = steered(llama_reward, lm, tokenizer)
    clone = rad.clone_for_call(seed=3)
    clone.beta = 0.0
    assert rad.beta == 8.0 and clone._value.reward_model is rad._value.reward_model


def test_import_needs_torch_and_transformers_only():
    code = "import openrlhf_ebft.rad, sys; sys.exit(any(m in sys.modules for m in ('ray', 'vllm', 'deepspeed')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
