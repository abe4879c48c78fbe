"""Weight updates of the real vLLM: complete, checked before anything changes, repeatable, no version before the end."""

from __future__ import annotations

import copy

import pytest
import torch

from openrlhf_ebft.distributed.weight_sync import WeightSyncError, WeightUpdate, build_update
from tests.rollouts.requests import request, train_steps
from tests.rollouts.vllm_engines import PROMPT, error, send, start
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    model = tiny_llama(folder, tied=True)
    engine = start(folder)
    yield model, engine
    engine.shutdown()


def test_after_two_steps_the_engine_equals_the_trainer_and_before_it_does_not(tied):
    model, engine = tied
    assert engine.weight_version == 0
    assert error(engine, model) < 1e-4
    train_steps(model)
    assert error(engine, model) > 0.1
    send(engine, model, 2)
    assert error(engine, model) < 1e-3
    assert engine.weight_version == 2
    assert engine.generate([request(PROMPT, [70])])[0].weight_version == 2


def test_tied_head_follows_the_embedding_when_only_the_embedding_is_sent(tied):
    model, engine = tied
    train_steps(model, 1)
    parameters = dict(model.named_parameters())
    assert "lm_head.weight" not in parameters
    send(engine, model, 3, parameters.items())
    assert error(engine, model) < 1e-3


def test_refused_update_changes_nothing_and_can_be_repeated(tied):
    model, engine = tied
    version, scores = engine.weight_version, engine.score([PROMPT])
    changed = copy.deepcopy(model)
    train_steps(changed, 1)
    tensors = dict(changed.state_dict())
    faults = {
        "missing: model.norm.weight": {k: v for k, v in tensors.items() if k != "model.norm.weight"},
        "unknown: model.extra": tensors | {"model.extra": torch.zeros(3)},
        r"model.norm.weight: got \[63\] float32, expected \[64\]": tensors | {"model.norm.weight": torch.zeros(63)},
        "are tied in the model but differ": tensors | {"lm_head.weight": torch.zeros(64, 64)},
    }
    for message, faulty in faults.items():
        with pytest.raises(WeightSyncError, match=message):
            send(engine, model, 90, faulty.items())
        assert engine.score([PROMPT]) == scores
        assert engine.weight_version == version
    send(engine, changed, 5)
    assert error(engine, changed) < 1e-3
    send(engine, model, 6)


def test_transport_failure_changes_nothing(tied):
    model, engine = tied
    scores = engine.score([PROMPT])
    update = build_update(91, model.state_dict().items(), dtype=torch.float32, chunk_bytes=20_000)

    def lose_second(handle):
        if handle is update.chunks[1]:
            raise ConnectionError("object lost")
        return handle

    with pytest.raises(ConnectionError, match="object lost"):
        engine.update_weights(update, lose_second)
    short = WeightUpdate(92, update.manifest, update.chunks[:-1])
    with pytest.raises(WeightSyncError, match="announced but not delivered"):
        engine.update_weights(short)
    assert engine.score([PROMPT]) == scores
    engine.update_weights(update)
    assert engine.weight_version == 91


def test_failure_inside_vllm_is_reported_blocks_sampling_and_can_be_repeated(tied, monkeypatch):
    model, engine = tied
    train_steps(model, 1)
    worker = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    target = worker.weight_transfer_engine.model
    real, calls = target.load_weights, []

    def fail_on_second(weights):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("kernel refused tensor")
        return real(weights)

    monkeypatch.setattr(target, "load_weights", fail_on_second)
    version = engine.weight_version
    with pytest.raises(WeightSyncError, match="failed in the engine, repeat it: RuntimeError: kernel refused tensor"):
        send(engine, model, 95)
    assert engine.weight_version == version
    with pytest.raises(WeightSyncError, match="weights are incomplete.*kernel refused tensor"):
        engine.generate([request(PROMPT, [70])])
    send(engine, model, 95)
    assert error(engine, model) < 1e-3
    assert engine.weight_version == 95


def test_tensor_that_vllm_does_not_load_is_an_error(tied, monkeypatch):
    """vLLM takes a partial set of tensors without a word; the receiver counts which parameters were reached."""
    model, engine = tied
    worker = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    target = worker.weight_transfer_engine.model
    real = target.load_weights
    monkeypatch.setattr(
        target, "load_weights", lambda weights: real([w for w in weights if w[0] != "model.norm.weight"])
    )
    with pytest.raises(WeightSyncError, match="did not reach these parameters.*: model.norm.weight"):
        send(engine, model, 96)
    monkeypatch.undo()
    send(engine, model, 97)
    assert error(engine, model) < 1e-3
