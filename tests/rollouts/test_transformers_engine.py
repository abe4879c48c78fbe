"""The transformers engine: cached and batched sampling equals plain forward passes."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BartConfig, BloomConfig, RwkvConfig

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.core.seeding import completion_seed
from openrlhf_ebft.distributed.weight_sync import WeightSyncError, build_update
from openrlhf_ebft.rollouts.anchor_prompts import AnchorPrompt
from openrlhf_ebft.rollouts.engine import build_engine
from openrlhf_ebft.rollouts.row_sampler import RowSampler, _batches
from openrlhf_ebft.rollouts.sampling import draw_tokens, draw_uniforms, sampler_logits
from tests.rollouts.requests import GREEDY, SAMPLED, request, token_logprobs, train_steps
from tests.tiny_gguf import write_llama_gguf
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen2

PROMPT = list(range(3, 45))
MAX_LEN = 96


def start(folder, config=None, sampling=SAMPLED, max_model_len=MAX_LEN):
    return build_engine(
        str(folder),
        config or RolloutConfig(engine="transformers"),
        sampling,
        dtype="float32",
        max_model_len=max_model_len,
        seed=0,
        threads=1,
    )


@pytest.fixture(scope="module", params=[tiny_llama, tiny_qwen2, tiny_gpt2])
def setup(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return request.param(folder), start(folder)


def naive(model, prompt, sampling, seed, limit):
    """One completion without cache, batch or padding."""
    tokens, logprobs = list(prompt), []
    for uniform in draw_uniforms([seed], limit)[0]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[:, -1]
        token = draw_tokens(logits, uniform[None], sampling)[0].item()
        tokens.append(token)
        logprobs.append(sampler_logits(logits, sampling).log_softmax(-1)[0, token].item())
        if token in sampling.stop_token_ids:
            break
    return tuple(tokens[len(prompt) :]), logprobs


@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, GREEDY, dataclasses.replace(SAMPLED, top_k=5, top_p=0.9, stop_token_ids=(1, 9, 20, 33))],
)
def test_batched_cached_samples_equal_the_naive_loop(setup, sampling):
    model, engine = setup
    asked = [request(PROMPT, [5, 33, 42], n=3, new=7), request([9, 8, 7], [2, 3], n=2, new=11, seed=9)]
    for one, rollout in zip(asked, engine.generate(asked, sampling), strict=True):
        tokens, anchors = one.reference.token_ids.tolist(), one.reference.anchors.tolist()
        for index, group in enumerate(rollout.completions):
            assert len(group) == one.num_samples
            for sample, completion in enumerate(group):
                seed = completion_seed(one.seed, index, sample)
                limit = int(one.reference.max_new_tokens[index])
                wanted_ids, wanted = naive(model, tokens[: anchors[index]], sampling, seed, limit)
                assert completion.token_ids == wanted_ids
                assert completion.logprobs == pytest.approx(wanted, abs=2e-5)
                ended = bool(sampling.stop_token_ids) and wanted_ids[-1] in sampling.stop_token_ids
                assert completion.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("config", [BartConfig, BloomConfig])
def test_prompts_of_different_lengths_in_rows_are_read_as_if_alone(config):
    """B01: Bart numbers positions itself, padding included; Bloom's depend on the distance alone."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    if config is BloomConfig:
        sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
    model = AutoModelForCausalLM.from_config(config(vocab_size=64, **sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    prompts = [AnchorPrompt("e", 0, list(range(3, 3 + length)), 5, 2, length) for length in (3, 9, 5)]
    sampling = dataclasses.replace(SAMPLED, temperature=1.0)
    with torch.no_grad():
        for prompt, group in zip(prompts, RowSampler(model).sample(prompts, sampling), strict=True):
            for sample, completion in enumerate(group):
                ids, logprobs = naive(model, prompt.token_ids, sampling, prompt.seed + sample, 5)
                assert completion.token_ids == ids
                assert completion.logprobs == pytest.approx(logprobs, abs=2e-5)


def test_a_model_without_a_cache_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match=r"'rwkv' gives back no cache .* set rollout\.engine to vllm"):
        RowSampler(model)


def test_different_limits_in_one_batch(setup):
    _, engine = setup
    one = request(PROMPT, [10, 20, 30], n=2)
    one.reference.max_new_tokens[:] = torch.tensor([1, 9, 4])
    (rollout,) = engine.generate([one], dataclasses.replace(SAMPLED, stop_token_ids=()))
    assert [[len(c.token_ids) for c in group] for group in rollout.completions] == [[1, 1], [9, 9], [4, 4]]


def test_greedy_equals_plain_generate(setup):
    model, engine = setup
    (rollout,) = engine.generate([request(PROMPT, [20, 42], new=12)], GREEDY)
    for anchor, group in zip((20, 42), rollout.completions, strict=True):
        ids = torch.tensor([PROMPT[:anchor]])
        mask = torch.ones_like(ids)
        wanted = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=-1)
        assert group[0].token_ids == tuple(wanted[0, anchor:].tolist())


def test_stop_tokens_and_truncation(setup):
    _, engine = setup
    (free,) = engine.generate([request(PROMPT, [42], new=4)], dataclasses.replace(SAMPLED, stop_token_ids=()))
    ids = free.completions[0][0].token_ids
    for position in range(4):
        stopping = dataclasses.replace(SAMPLED, stop_token_ids=(ids[position],))
        (rollout,) = engine.generate([request(PROMPT, [42], new=4)], stopping)
        completion = rollout.completions[0][0]
        assert completion.token_ids == ids[: ids.index(ids[position]) + 1]
        assert completion.finish_reason == "stop"
    assert free.completions[0][0].finish_reason == "length"


def test_score_equals_plain_forward(setup):
    model, engine = setup
    for sequence, scores in zip([PROMPT, [3, 9], [7]], engine.score([PROMPT, [3, 9], [7]]), strict=True):
        assert scores == pytest.approx(token_logprobs(model, sequence).tolist(), abs=1e-6)
    with pytest.raises(ValueError, match="sequence 0 has 97 tokens; the engine scores 1 to 96"):
        engine.score([[3] * 97])


@pytest.mark.parametrize("names", ["state_dict", "named_parameters"])
def test_update_weights(setup, names):
    model, engine = setup
    trained = copy.deepcopy(model)
    train_steps(trained)
    before = engine.score([PROMPT])[0]
    assert max(abs(a - b) for a, b in zip(before, token_logprobs(trained, PROMPT).tolist(), strict=True)) > 0.1
    tensors = trained.state_dict().items() if names == "state_dict" else trained.named_parameters()
    engine.update_weights(build_update(4, tensors, dtype=torch.float32, chunk_bytes=10_000))
    assert engine.score([PROMPT])[0] == pytest.approx(token_logprobs(trained, PROMPT).tolist(), abs=1e-5)
    assert engine.generate([request(PROMPT, [5])])[0].weight_version == engine.weight_version == 4
    engine.update_weights(build_update(0, model.state_dict().items(), dtype=torch.float32))


def test_refused_update_changes_nothing(setup):
    model, engine = setup
    before = engine.score([PROMPT])
    tensors = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dropped = next(name for name in tensors if "norm" in name or "ln" in name)
    tensors.pop(dropped)
    with pytest.raises(WeightSyncError, match=f"missing: {dropped}"):
        engine.update_weights(build_update(9, tensors.items(), dtype=torch.float32))
    assert engine.score([PROMPT]) == before
    assert engine.weight_version != 9


def test_generation_config_of_the_folder_does_not_leak(tmp_path):
    model = tiny_llama(tmp_path)
    path = tmp_path / "generation_config.json"
    leak = {"do_sample": True, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.5}
    path.write_text(json.dumps(json.loads(path.read_text()) | leak))
    plain = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=())
    engine = start(tmp_path, sampling=plain)
    (rollout,) = engine.generate([request(PROMPT, [42], n=4, new=20)])
    for completion in rollout.completions[0]:
        wanted = token_logprobs(model, PROMPT + list(completion.token_ids))[len(PROMPT) - 1 :]
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
    settings = engine.effective_settings()
    assert (settings["sampling/top_k"], settings["sampling/top_p"], settings["sampling/temperature"]) == (0, 1.0, 1.0)
    json.dumps(settings)


def test_over_long_prompt_names_the_example(setup):
    _, engine = setup
    with pytest.raises(ValueError, match=r"'long', anchor 0: 42 prompt tokens \+ 55 new tokens .* 96"):
        engine.generate([request(PROMPT, [42], new=55, name="long")])


def test_bad_settings(tmp_path):
    tiny_llama(tmp_path)
    with pytest.raises(ValueError, match="max_model_len=513 is more than the 512 positions"):
        start(tmp_path, max_model_len=513)
    with pytest.raises(ValueError, match="stop_token_ids: token id 64 at position 1"):
        start(tmp_path, sampling=dataclasses.replace(SAMPLED, stop_token_ids=(1, 64)))
    with pytest.raises(ValueError, match=r"rollout.weight_transfer=nccl is vLLM's"):
        start(tmp_path, RolloutConfig(engine="transformers", weight_transfer="nccl"))


def test_batches_cover_every_prompt_once_within_the_row_limit():
    prompts = [AnchorPrompt("e", i, [3] * (1 + i % 7), 4, (4, 4, 30, 100)[i % 4], 0) for i in range(60)]
    batches = _batches(prompts)
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    for batch in batches:
        assert len({prompts[index].num_samples for index in batch}) == 1
        assert len(batch) == 1 or len(batch) * prompts[batch[0]].num_samples <= 64


def test_gguf_model_is_served_and_updated(tmp_path):
    model = tiny_llama(tmp_path / "plain", tied=False)
    write_llama_gguf(model, tmp_path / "tiny.gguf")
    engine = start(tmp_path / "tiny.gguf")
    assert engine.score([PROMPT])[0] == pytest.approx(token_logprobs(model, PROMPT).tolist(), abs=1e-5)
    train_steps(model)
    engine.update_weights(build_update(2, model.state_dict().items(), dtype=torch.float32))
    assert engine.score([PROMPT])[0] == pytest.approx(token_logprobs(model, PROMPT).tolist(), abs=1e-5)
