"""The trainer's side of GPU transfers, as far as it runs without a GPU: protocol, ranks, what vLLM's sender checks."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ebft.distributed.native_transfer import EngineFleet, NamedTensorSource, _init_info
from openrlhf_ebft.distributed.weight_sync import TensorSpec, WeightSyncError, build_update
from tests.rollouts.requests import train_steps
from tests.rollouts.vllm_engines import error, start
from tests.tiny_models import tiny_llama

TENSORS = {"a": torch.rand(2, 3), "b": torch.rand(4)}
SPECS = [TensorSpec(name, tuple(tensor.shape), "bfloat16") for name, tensor in TENSORS.items()]


def test_every_engine_gets_its_own_ranks():
    seen = []
    fleet = EngineFleet([lambda m, a, e=e: seen.append((e, m, a)) for e in range(3)], workers_per_engine=2)
    assert fleet.num_workers == 6
    sent = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 7}
    fleet.init_weight_transfer_engine(sent)
    assert sorted((e, m, a["rank_offset"]) for e, m, a in seen) == [
        (0, "connect_weight_transfer", 1),
        (1, "connect_weight_transfer", 3),
        (2, "connect_weight_transfer", 5),
    ]
    assert sent["rank_offset"] == 1


def test_error_of_any_engine_reaches_the_trainer():
    def refuse(method, argument):
        raise WeightSyncError("engine 1 says no")

    fleet = EngineFleet([lambda method, argument: None, refuse], workers_per_engine=1)
    with pytest.raises(WeightSyncError, match="engine 1 says no"):
        fleet.start_weight_update()


@pytest.mark.stack
def test_source_passes_the_check_of_vllms_sender():
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    check = NCCLTrainerWeightTransferEngine._checked_iter
    source = NamedTensorSource(SPECS, lambda: iter(TENSORS.items()))
    for _ in range(2):  # a fresh pass each time
        passed = dict(check(source, source.metadata()))
        assert torch.equal(passed["a"], TENSORS["a"].bfloat16())
    with pytest.raises(ValueError, match="disagrees with iteration at index 0"):
        swapped = NamedTensorSource(SPECS, lambda: iter(reversed(TENSORS.items())))
        list(check(swapped, swapped.metadata()))
    with pytest.raises(ValueError, match="shorter"):
        list(NamedTensorSource(SPECS, lambda: iter([("a", TENSORS["a"])])))


@pytest.mark.stack
def test_init_info_names_a_registered_backend_and_counts_the_sender():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    nccl = _init_info("nccl", rank=0, num_workers=6, address="host", port=5000)
    ipc = _init_info("ipc", rank=1, num_workers=6, address="host", port=5000)
    assert (nccl.backend, nccl.world_size, nccl.is_sender) == ("nccl", 7, True)
    assert (ipc.backend, ipc.packed, ipc.is_sender) == ("ipc", True, False)
    for backend in ("nccl", "ipc"):
        assert backend in WeightTransferEngineFactory._registry
        assert backend in WeightTransferTrainerFactory._registry


@pytest.mark.stack
def test_protocol_drives_a_real_engine(tmp_path):
    """vLLM's four protocol calls, with the CPU backend's payload: a refusal, an update left open, a complete one."""
    model = tiny_llama(tmp_path)
    engine = start(tmp_path)
    try:
        fleet = EngineFleet([lambda method, argument: getattr(engine, method)(argument)], workers_per_engine=1)
        train_steps(model)
        update = build_update(3, model.state_dict().items(), dtype=torch.float32)
        fleet.announce(3, [spec for spec in update.manifest if spec.name != "model.norm.weight"])
        with pytest.raises(WeightSyncError, match="old weights stay: missing: model.norm.weight"):
            fleet.start_weight_update()
        assert engine.weight_version == 0
        fleet.announce(3, update.manifest)
        fleet.start_weight_update()
        few = {name: update.chunks[0][name] for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")}
        fleet.update_weights({"tensors": few, "last": False})
        with pytest.raises(WeightSyncError, match="started and not finished"):
            engine.score([[3, 4, 5]])
        fleet.start_weight_update()
        fleet.update_weights({"tensors": update.chunks[0], "last": True})
        fleet.finish_weight_update()
        assert engine.weight_version == 3
        assert error(engine, model) < 1e-3
    finally:
        engine.shutdown()
