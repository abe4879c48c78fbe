"""Engines that take adapters alone: equal to the trainer's model, checked first, never two versions mixed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf_ebft.distributed.full_tensors import full_weights
from openrlhf_ebft.distributed.weight_sync import WeightSyncError
from openrlhf_ebft.models.policy import PolicyModel
from tests.models.families import CONFIGS, build
from tests.rollouts.adapted import adapted_model, change, send_adapters, start_engine
from tests.rollouts.requests import request, token_logprobs
from tests.rollouts.vllm_engines import PROMPT, error, send, start
from tests.tiny_models import tiny_gpt2, tiny_llama


def policy_of(model, adapters) -> PolicyModel:
    return PolicyModel(model, "sdpa", temperature=1.0, chunk_tokens=100, adapters=adapters)


@pytest.mark.stack
def test_a_model_without_adapters_in_vllm_is_named_and_takes_merged_weights(tmp_path):
    tiny_gpt2(tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel does not support LoRA.*lora.sync"):
        start_engine(tmp_path, "vllm")
    model, adapters = adapted_model(tmp_path)
    change(adapters, 1)
    engine = start(tmp_path)
    try:
        assert error(engine, model) > 0.1
        send(engine, model, 1, full_weights(policy_of(model, adapters)))
        assert error(engine, model) < 1e-3
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma", "gpt2", "gpt_neox", "opt"])
def test_every_family_follows_both_ways_in_the_transformers_engine(tmp_path, name):
    build(AutoModelForCausalLM, CONFIGS[name]).save_pretrained(tmp_path)
    model, adapters = adapted_model(tmp_path)
    tokens = [3 + (5 * i) % 40 for i in range(20)]
    ids = torch.tensor([tokens])
    engines = {
        sync: start_engine(tmp_path, "transformers", sync=sync, max_model_len=60) for sync in ("adapter", "merged")
    }
    for version in (1, 2):
        change(adapters, version)
        send_adapters(engines["adapter"], adapters, version)
        send(engines["merged"], model, version, full_weights(policy_of(model, adapters)))
        with torch.no_grad():
            table = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        right = table.gather(1, ids[0, 1:, None])[:, 0]
        for engine in engines.values():
            assert engine.weight_version == version
            assert (torch.tensor(engine.score([tokens])[0]) - right).abs().max() < 1e-4


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.stack)])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    tiny_llama(folder)
    model, adapters = adapted_model(folder)
    engine = start_engine(folder, request.param)
    yield model, adapters, engine
    engine.shutdown()


def sampled_error(engine, model) -> float:
    """Largest difference of the sampler's log-probabilities from the model's."""
    (rollout,) = engine.generate([request(PROMPT, [70], n=2)])
    errors = []
    for completion in rollout.completions[0]:
        right = token_logprobs(model, [*PROMPT, *completion.token_ids], 0.7)[len(PROMPT) - 1 :]
        errors.append((torch.tensor(completion.logprobs) - right).abs().max().item())
    return max(errors)


def test_the_engine_follows_the_trainer_and_no_version_reads_the_cache_of_another(pair):
    model, adapters, engine = pair
    assert error(engine, model) < 1e-4  # B is zero
    for version in range(1, 5):
        change(adapters, version)
        assert error(engine, model) > 0.1
        send_adapters(engine, adapters, version)
        assert engine.weight_version == version
        assert sampled_error(engine, model) < 1e-3
        assert error(engine, model) < 1e-3


def test_refused_adapters_change_nothing(pair):
    model, adapters, engine = pair
    send_adapters(engine, adapters, 20)
    scores = engine.score([PROMPT])
    lost = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    with pytest.raises(WeightSyncError, match=rf"old weights stay: missing: {lost} \[64, 4\] float32"):
        send_adapters(engine, adapters, 21, without=lost)
    assert engine.score([PROMPT]) == scores
    assert engine.weight_version == 20
    change(adapters, 22)
    send_adapters(engine, adapters, 22)
    assert error(engine, model) < 1e-3


def test_ten_updates_leave_the_base_model_as_it_was(pair, tmp_path):
    _, adapters, engine = pair
    plain = tiny_llama(tmp_path)
    for version in range(30, 40):
        change(adapters, version)
        send_adapters(engine, adapters, version)
    for name, parameter in adapters.named_parameters():
        if ".lora_B." in name:
            parameter.data.zero_()
    send_adapters(engine, adapters, 40)
    assert error(engine, plain) < 1e-4


def test_a_failed_load_keeps_the_old_adapter_and_caches_belong_to_one_version(pair, monkeypatch):
    model, adapters, engine = pair
    if type(engine).__name__ != "VLLMRolloutEngine":
        pytest.skip("the transformers engine only copies, and has no prefix cache")
    change(adapters, 50)
    send_adapters(engine, adapters, 50)
    scores = engine.score([PROMPT])
    single = request(PROMPT, [70])
    assert engine.generate([single])[0].cached_tokens == 64  # scoring has read the same prompt

    def fail(lora):
        raise OSError("no room")

    change(adapters, 51)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.llm_engine, "add_lora", fail)
        with pytest.raises(WeightSyncError, match="old weights stay: OSError: no room"):
            send_adapters(engine, adapters, 51)
    assert engine.score([PROMPT]) == scores
    assert engine.weight_version == 50
    assert engine.generate([single])[0].cached_tokens == 64
    send_adapters(engine, adapters, 51)
    assert engine.generate([single])[0].cached_tokens == 0
    assert error(engine, model) < 1e-3
    assert [path.name for path in engine._adapter._root.iterdir()] == [engine._adapter.request.lora_name]
    assert engine._llm.llm_engine.list_loras() == {engine._adapter.request.lora_int_id}
