"""The doctor's findings: sizes from headers, memory by hand, layouts as text, problems with what to change."""

import socket

import pytest
import torch

from openrlhf_ebft.actors.doctor import Findings, examine_config
from openrlhf_ebft.actors.free_resources import NodeResources
from openrlhf_ebft.actors.layout_report import engine_problems, layout_lines, parse_cluster
from openrlhf_ebft.actors.machine import (
    GIB,
    GPU,
    Machine,
    free_disk,
    list_gpus,
    package_problems,
    package_versions,
    parse_gpus,
    ports_in_use,
    read_machine,
)
from openrlhf_ebft.actors.memory_estimate import ModelSize, checkpoint_bytes, estimate_memory, read_model_size
from openrlhf_ebft.actors.placement import ENGINE, FEATURES, REFERENCE, TRAINER, plan_placement
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from tests.tiny_models import tiny_gpt2, tiny_llama

# Llama-3.1-70B: 80 blocks, hidden 8192, feed-forward 28672, 64 heads, 8 key/value heads, vocabulary 128256, untied head
_SIDES_70B = 2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672)
_BLOCK_70B = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
LLAMA_70B = ModelSize((_BLOCK_70B,) * 80, 128256 * 8192 + 8192, 128256 * 8192, 80 * _SIDES_70B)


def make_config(folder="m", **sections) -> EBFTConfig:
    sections["logging"] = {"root": str(sections.pop("root", "runs"))}
    return EBFTConfig(name="test", model={"path": str(folder)}, data={"path": "d"}, **sections)


def needs(config: EBFTConfig, size: ModelSize, gpu_bytes: float | None = None):
    return {need.role: need for need in estimate_memory(config, size, size, size, gpu_bytes=gpu_bytes)}


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_from_headers_equal_those_of_the_loaded_model(tmp_path, tied):
    model = tiny_llama(tmp_path, tied=tied)
    size = read_model_size(tmp_path)
    assert size.total == sum(parameter.numel() for parameter in model.parameters())
    assert len(size.by_block) == 2
    assert size.up_to(0.5) == size.rest + size.by_block[0] and size.up_to(0.75) == size.rest + sum(size.by_block)
    assert size.head == (0 if tied else model.lm_head.weight.numel())
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    assert size.matrix_sides == sum(module.in_features + module.out_features for module in linear)


def test_sizes_of_other_names(tmp_path):
    model = tiny_gpt2(tmp_path)
    assert read_model_size(tmp_path).total == sum(parameter.numel() for parameter in model.parameters())
    (tmp_path / "empty").mkdir()
    assert read_model_size(tmp_path / "empty") is None


def test_a_70b_model_has_its_published_number_of_parameters():
    assert LLAMA_70B.total == pytest.approx(70.55e9, rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "dtype", "offload", "per_parameter", "host"),
    [
        (0, "float32", False, 16, 0),
        (0, "bfloat16", False, 2 + 6 + 12 / 32, 0),
        (2, "bfloat16", False, 2 + (6 + 12) / 32, 0),
        (3, "bfloat16", False, 20 / 32, 0),
        (3, "bfloat16", True, 8 / 32, 12 / 32),
    ],
)
def test_bytes_of_a_trainer_rank(stage, dtype, offload, per_parameter, host):
    config = make_config(
        policy={"num_ranks": 32, "prompts_per_step": 32}, deepspeed={"zero_stage": stage, "offload_optimizer": offload}
    )
    config.model.dtype = dtype
    need = needs(config, LLAMA_70B)[TRAINER]
    assert need.device == pytest.approx(per_parameter * LLAMA_70B.total)
    assert need.host == pytest.approx(host * LLAMA_70B.total)


def test_adapters_have_small_states():
    config = make_config(lora={"rank": 16})
    adapters = 16 * LLAMA_70B.matrix_sides
    assert needs(config, LLAMA_70B)[TRAINER].device == pytest.approx(2 * (LLAMA_70B.total + adapters) + 18 * adapters)
    assert checkpoint_bytes(config, LLAMA_70B) == pytest.approx(2 * LLAMA_70B.total)


def test_checkpoints_in_the_background_are_copied_into_host_memory():
    """bfloat16: 2 bytes of each weight, and 12 of optimizer states and masters."""
    config = make_config(checkpoint={"every_steps": 10, "background": True})
    assert needs(config, LLAMA_70B)[TRAINER].host == 14 * LLAMA_70B.total
    assert needs(make_config(), LLAMA_70B)[TRAINER].host == 0


def test_averages_and_reference_models_come_on_top():
    plain, config = make_config(), make_config(policy={"ema_decay": 0.99, "kl_coef": 0.1})
    assert needs(config, LLAMA_70B)[TRAINER].device == needs(plain, LLAMA_70B)[TRAINER].device + 4 * LLAMA_70B.total
    assert needs(config, LLAMA_70B)[REFERENCE].device == 2 * LLAMA_70B.total
    assert REFERENCE not in needs(plain, LLAMA_70B)


def test_features_of_the_base_model_need_no_memory_of_their_own():
    assert FEATURES not in needs(make_config(lora={"rank": 8}, features={"source": "policy_base"}), LLAMA_70B)


def test_supervised_training_without_evaluation_needs_the_trainer_s_memory_alone():
    config = make_config(policy={"objective": "sft"}, evaluation={"max_examples": 0})
    assert set(needs(config, LLAMA_70B, 80 * GIB)) == {TRAINER}


def test_bytes_of_engines_and_features():
    config = make_config(rollout={"tensor_parallel_size": 8, "kv_cache_gib": 2.0})
    on_cpu, on_gpu = needs(config, LLAMA_70B), needs(config, LLAMA_70B, 80 * GIB)
    assert on_cpu[ENGINE].device == pytest.approx(2 * LLAMA_70B.total / 8 + 2 * GIB)
    assert on_gpu[ENGINE].device == pytest.approx(0.85 * 80 * GIB)
    assert on_gpu[FEATURES].device == pytest.approx(2 * (LLAMA_70B.rest + 60 * _BLOCK_70B))


def test_checkpoints_are_counted_with_the_one_being_written():
    config = make_config(checkpoint={"every_steps": 10, "keep_last": 2})
    assert checkpoint_bytes(config, LLAMA_70B) == pytest.approx((3 * 14 + 2) * LLAMA_70B.total)


def test_layout_as_text():
    config = make_config(policy={"num_ranks": 4}, rollout={"tensor_parallel_size": 8}, features={"num_replicas": 2})
    nodes = parse_cluster("2x8x64")
    assert layout_lines(plan_placement(config, nodes), nodes) == [
        "node  CPU         GPU     holds",
        "0     0.75 of 64  8 of 8  rollout engine 0, reward aggregator 0",
        "1     2.5 of 64   6 of 8  policy trainer 0-3, feature network 0-1",
    ]
    nodes = parse_cluster("1x1")
    assert "take turns" in layout_lines(plan_placement(make_config(), nodes), nodes)[-1]


@pytest.mark.parametrize("text", ["2", "2x", "x8", "0x8", "2x8x", "two"])
def test_cluster_shapes_are_checked(text):
    with pytest.raises(UserError, match="NODESxGPUS"):
        parse_cluster(text)


def examined(config, nodes, machine=None, gpu_bytes=None) -> Findings:
    findings = Findings()
    examine_config(config, nodes, machine, gpu_bytes, findings)
    return findings


def machine(free: float) -> Machine:
    return Machine(2, (), 24.0 * GIB, free)


def test_a_fitting_run_has_no_problems(tmp_path):
    tiny_llama(tmp_path / "m")
    found = examined(make_config(tmp_path / "m", root=tmp_path), [NodeResources(2, 0)], machine(8 * GIB))
    assert found.problems == []
    assert any("policy trainer 0, rollout engine 0" in line for line in found.lines)


def test_too_little_memory_names_needs_and_what_to_change(tmp_path):
    tiny_llama(tmp_path / "m")
    (problem,) = examined(
        make_config(tmp_path / "m", root=tmp_path), [NodeResources(2, 0)], machine(0.5 * GIB)
    ).problems
    assert "memory: the actors need 1.0 GiB" in problem and "0.5 GiB are free" in problem and "lora.rank" in problem


def test_too_small_gpus_name_the_roles_on_them(tmp_path):
    tiny_llama(tmp_path / "m")
    config = make_config(tmp_path / "m", rollout={"gpu_memory_utilization": 1.0})
    (problem,) = examined(config, [NodeResources(8, 1)], None, 1 * GIB).problems
    assert "policy trainer + rollout engine + feature network on one GPU: 1.0 GiB" in problem
    assert examined(config, [NodeResources(8, 3)], None, 1 * GIB).problems == []
    assert "tensor_parallel_size" in engine_problems(141e9, 68e9)[0] and engine_problems(18e9, 68e9) == []


def test_a_layout_that_does_not_fit_is_a_problem_not_an_error():
    (problem,) = examined(make_config(placement={"trainer_cpus": 2.0}), [NodeResources(1, 0)]).problems
    assert "asked: 3 CPU" in problem and "node 0: 1 CPU" in problem


def test_the_size_of_a_hub_model_is_not_invented():
    found = examined(make_config("Qwen/Qwen2.5-1.5B"), [NodeResources(8, 8)], None, 80 * GIB)
    assert found.problems == [] and any("its size is not known here" in line for line in found.lines)


def test_what_nvidia_smi_prints_becomes_gpus():
    gpus = parse_gpus("NVIDIA H100 80GB HBM3, 81559, 81000\nA100, PCIe, 40960, 100\n\n")
    assert gpus == (
        GPU("NVIDIA H100 80GB HBM3", 81559 * 2**20, 81000 * 2**20),
        GPU("A100, PCIe", 40960 * 2**20, 100 * 2**20),
    )
    assert isinstance(list_gpus(), tuple)


def test_this_machine_is_read():
    here = read_machine()
    assert here.cores >= 1 and 0 < here.free_memory <= here.memory


def test_versions_are_compared_with_the_package_metadata():
    versions = package_versions()
    assert package_problems(versions) == []
    assert "torch 1.0 is installed, but ==2.13.0" in package_problems(versions | {"torch": "1.0"})[0]
    assert "ray is not installed" in package_problems(versions | {"ray": None})[0]


def test_ports_and_disk(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.2", 0))  # Ray's job agent listens at the node's address alone
        server.listen()
        taken = server.getsockname()[1]
        assert ports_in_use([taken]) == [taken]
    assert ports_in_use([taken]) == []
    assert free_disk(tmp_path / "not" / "there") == free_disk(tmp_path)
