"""An engine that sleeps between its calls, up to vLLM's own calls: on CPUs they free no memory, but they do stop the
scheduler, so an engine that forgot to wake would not answer."""

import pytest
import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.rollouts.vllm_launch import engine_arguments
from tests.rollouts.requests import request
from tests.rollouts.vllm_engines import PROMPT, error, send, start
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_llama(folder)
    engine = start(folder, config=RolloutConfig(kv_cache_gib=0.05, block_size=32, sleep=True))
    yield model, engine
    engine.shutdown()


def is_asleep(engine) -> bool:
    """What vLLM itself says."""
    return engine._llm.llm_engine.engine_core.is_sleeping()


def test_it_sleeps_from_the_start_and_after_every_call(setup):
    model, engine = setup
    assert is_asleep(engine)
    assert error(engine, model) < 5e-5
    assert is_asleep(engine)
    (rollout,) = engine.generate([request(PROMPT[:20], [20], n=3, name="a")])
    assert len(rollout.completions[0]) == 3
    assert is_asleep(engine)


def test_new_weights_wake_it_and_it_sleeps_again(setup):
    model, engine = setup
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    send(engine, model, 1)
    assert is_asleep(engine) and engine.weight_version == 1
    assert error(engine, model) < 5e-5


def test_a_refused_request_leaves_it_usable(setup):
    model, engine = setup
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        engine.score([[]])
    assert error(engine, model) < 5e-5


def test_sleep_mode_is_asked_for_on_gpus_only():
    assert engine_arguments(RolloutConfig(sleep=True), on_cpu=False)["enable_sleep_mode"] is True
    assert engine_arguments(RolloutConfig(), on_cpu=False)["enable_sleep_mode"] is False
    assert "enable_sleep_mode" not in engine_arguments(RolloutConfig(sleep=True), on_cpu=True)


@pytest.mark.parametrize(("size", "executor"), [(1, "uni"), (4, "mp")])
def test_workers_of_an_engine_stay_in_its_actor(size, executor):
    """In a Ray placement group vLLM's own choice would be Ray's executor, with bundles that nobody has reserved."""
    arguments = engine_arguments(RolloutConfig(tensor_parallel_size=size), on_cpu=False)
    assert arguments["distributed_executor_backend"] == executor
