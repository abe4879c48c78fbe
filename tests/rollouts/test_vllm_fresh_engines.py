"""Cases of weight updates that need an engine of their own."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.distributed.weight_sync import WeightSyncError, build_update
from openrlhf_ebft.rollouts.engine import build_engine
from tests.rollouts.requests import request, train_steps
from tests.rollouts.vllm_engines import PROMPT, error, send, start
from tests.tiny_models import tiny_llama, tiny_qwen2

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(
    ("config", "temperature", "message"),
    [
        ({"block_size": 16}, 0.7, "rollout.block_size=16: .* multiple of 32"),
        ({"weight_transfer": "nccl"}, 0.7, "rollout.weight_transfer=nccl needs a GPU"),
        ({"tensor_parallel_size": 2}, 0.7, "rollout.tensor_parallel_size=2"),
        ({}, 0.005, "rollout.temperature=0.005: vLLM samples at 0.01"),
    ],
)
def test_settings_that_vllm_would_change_are_refused(tmp_path, config, temperature, message):
    sampling = SamplingSettings(temperature=temperature, top_p=1.0, top_k=0, stop_token_ids=())
    with pytest.raises(ValueError, match=message):
        build_engine(
            str(tmp_path), RolloutConfig(**config), sampling, dtype="float32", max_model_len=64, seed=0, threads=1
        )


def test_gguf_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.gguf: .* prepare-model"):
        start(tmp_path / "model.gguf")


def test_repeated_prompt_after_an_update_equals_a_fresh_engine(tmp_path):
    model = tiny_llama(tmp_path / "a")
    engine = start(tmp_path / "a")
    asked = [request(PROMPT, [70], n=1, new=16), request(PROMPT, [65], n=1, new=16, seed=8)]
    engine.generate(asked)
    assert engine.generate(asked)[0].cached_tokens == 64
    train_steps(model, 1)
    send(engine, model, 1)
    after = engine.generate(asked[:1]) + engine.generate(asked[1:])
    assert after[0].cached_tokens == 0
    engine.shutdown()  # one engine at a time in a process
    model.save_pretrained(tmp_path / "b")
    fresh = start(tmp_path / "b")
    try:
        wanted = fresh.generate(asked[:1]) + fresh.generate(asked[1:])
    finally:
        fresh.shutdown()
    for one, other in zip(after, wanted, strict=True):
        ((mine,),), ((theirs,),) = one.completions, other.completions
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_untied_model_with_biases(tmp_path):
    model = tiny_qwen2(tmp_path, tied=False)
    engine = start(tmp_path)
    try:
        assert error(engine, model) < 1e-4
        train_steps(model)
        assert error(engine, model) > 0.1
        send(engine, model, 2)
        assert error(engine, model) < 1e-3
    finally:
        engine.shutdown()


def test_updated_bfloat16_engine_equals_a_fresh_one_bit_for_bit(tmp_path):
    """In bfloat16 vLLM packs weights and casts biases for its CPU kernels; an update must go through all of it."""
    model = tiny_qwen2(tmp_path / "a", tied=True)
    engine = start(tmp_path / "a", "bfloat16")
    before = engine.score([PROMPT])
    train_steps(model)
    with pytest.raises(WeightSyncError, match=r"got \[.*\] float32, expected \[.*\] bfloat16"):
        send(engine, model, 1)
    assert engine.score([PROMPT]) == before
    for version in (2, 3):
        engine.update_weights(build_update(version, model.state_dict().items(), dtype=torch.bfloat16))
    updated = engine.score([PROMPT])
    assert updated != before
    engine.shutdown()
    model.save_pretrained(tmp_path / "b")
    fresh = start(tmp_path / "b", "bfloat16")
    try:
        assert fresh.score([PROMPT]) == updated
    finally:
        fresh.shutdown()
