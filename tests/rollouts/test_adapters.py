"""Engines that take adapters alone: equal to the trainer's model, checked first, never two versions mixed."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ebft.distributed.weight_sync import WeightSyncError
from tests.rollouts.adapted import adapted_model, change, send_adapters, start_engine
from tests.rollouts.requests import request, token_logprobs
from tests.rollouts.vllm_engines import PROMPT, error
from tests.tiny_models import tiny_gpt2, tiny_llama


@pytest.mark.stack
def test_a_model_that_vllm_gives_no_adapters_is_named(tmp_path):
    tiny_gpt2(tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel does not support LoRA.*lora.sync"):
        start_engine(tmp_path, "vllm")


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
