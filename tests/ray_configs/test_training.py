"""Every training configuration passes the validator and fits a cluster of the shape that it names."""

import re
import subprocess
import sys

import pytest

from openrlhf_ebft.actors.layout_report import engine_problems, gpu_problems, layout_lines, parse_cluster
from openrlhf_ebft.actors.memory_estimate import ModelSize, estimate_memory
from openrlhf_ebft.actors.placement import ENGINE, PlacementError, plan_placement, settle_sharing
from openrlhf_ebft.config import load_config
from openrlhf_ebft.config.errors import ConfigError
from openrlhf_ebft.config.rules import list_notes
from tests.processes import ROOT

SHAPES = {
    "ray_configs/local_cpu.yaml": "1x0x2",
    "ray_configs/single_gpu.yaml": "1x1x16",
    "ray_configs/eight_gpus.yaml": "1x8x96",
    "ray_configs/two_nodes.yaml": "2x8x96",
    "ray_configs/llama_70b.yaml": "8x8x96",
    "examples/qwen2.5_1.5b_code.yaml": "1x8x96",
    "examples/llama3.2_1b_code.yaml": "1x8x96",
    "examples/qwen2.5_1.5b_unstructured_code.yaml": "1x8x96",
    "examples/llama3.2_1b_translation.yaml": "1x8x96",
}
OTHER_KINDS = {"rad_sentiment.yaml", "serve_rad_sentiment.yaml"}
NOT_TRAINING = re.compile(r"cluster_|kuberay_|runtime_env")


def llama_like(blocks: int, hidden: int, feed_forward: int, kv: int, vocabulary: int, tied: bool) -> ModelSize:
    """Parameters of a Llama or Qwen2.5 model without biases."""
    sides = 2 * 2 * hidden + 2 * (hidden + kv) + 3 * (hidden + feed_forward)
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * feed_forward + 2 * hidden
    table = vocabulary * hidden
    return ModelSize((block,) * blocks, table + hidden, 0 if tied else table, blocks * sides)


SIZES = {
    "Qwen/Qwen2.5-1.5B": llama_like(28, 1536, 8960, 256, 151936, True),
    "meta-llama/Llama-3.2-1B": llama_like(16, 2048, 8192, 512, 128256, True),
    "meta-llama/Llama-3.1-8B": llama_like(32, 4096, 14336, 1024, 128256, False),
    "meta-llama/Llama-3.1-70B": llama_like(80, 8192, 28672, 1024, 128256, False),
}


def training_files() -> set[str]:
    own = {path for path in (ROOT / "ray_configs").glob("*.yaml") if not NOT_TRAINING.match(path.name)}
    examples = {path for path in (ROOT / "examples").glob("*.yaml") if path.name not in OTHER_KINDS}
    return {str(path.relative_to(ROOT)) for path in own | examples}


def test_every_training_file_is_in_the_table():
    """Those of the quickstart and of the strided page have tests of their own; all of ray_configs are here."""
    assert set(SHAPES) == training_files() - {"examples/quickstart.yaml", "examples/strided_stdlib.yaml"}


def test_sizes_are_the_published_ones():
    published = {
        "Qwen/Qwen2.5-1.5B": 1.54e9,
        "meta-llama/Llama-3.2-1B": 1.24e9,
        "meta-llama/Llama-3.1-8B": 8.03e9,
        "meta-llama/Llama-3.1-70B": 70.6e9,
    }
    for name, total in published.items():
        assert SIZES[name].total == pytest.approx(total, rel=0.005), name


@pytest.mark.parametrize("name", SHAPES)
def test_it_fits_the_cluster_that_it_is_for(name, capsys):
    config = load_config(ROOT / name)
    nodes = parse_cluster(SHAPES[name])
    placement = plan_placement(config, nodes)
    with capsys.disabled():
        print(f"\n{name} on {SHAPES[name]}", *layout_lines(placement, nodes), sep="\n  ")
    assert placement.shares_gpus == (name == "ray_configs/single_gpu.yaml")
    used = sum(bundle.gpus for bundle in placement.bundles)
    assert used == sum(node.gpus for node in nodes), "GPUs are left over"
    assert list_notes(config) == []
    if config.model.path in SIZES:
        check_memory(settle_sharing(config, placement), placement)


def check_memory(config, placement) -> None:
    """Weights and states fit GPUs of 80 GB and leave a quarter of them to activations."""
    gpu = 80e9
    policy = SIZES[config.model.path]
    memory = estimate_memory(config, policy, SIZES[config.features.path or config.model.path], policy, gpu_bytes=gpu)
    trainers = [need for need in memory if need.role != ENGINE]
    assert gpu_problems(trainers, placement, 0.75 * gpu) == []
    assert gpu_problems(memory, placement, gpu) == []
    weights = 2 * policy.total / config.rollout.tensor_parallel_size
    assert engine_problems(weights, 0.9 * config.rollout.gpu_memory_utilization * gpu) == []


@pytest.mark.parametrize("name", [name for name in SHAPES if "local_cpu" not in name])
def test_gpu_configurations_refuse_a_cluster_without_gpus(name):
    with pytest.raises(PlacementError, match="require_gpus = true"):
        plan_placement(load_config(ROOT / name), parse_cluster("4x0x64"))


def test_too_small_a_cluster_is_refused():
    for name, shape in (("llama_70b", "7x8x96"), ("two_nodes", "1x8x96"), ("eight_gpus", "2x3x96")):
        with pytest.raises(PlacementError, match="no node has room left"):
            plan_placement(load_config(ROOT / "ray_configs" / f"{name}.yaml"), parse_cluster(shape))


def test_paper_settings():
    code, raw, translation = (
        load_config(ROOT / "examples" / name)
        for name in ("qwen2.5_1.5b_code.yaml", "qwen2.5_1.5b_unstructured_code.yaml", "llama3.2_1b_translation.yaml")
    )
    for config in (code, raw, translation):
        assert config.data.mode == "strided" and config.rollout.samples_per_prompt == 4
        assert (config.rollout.temperature, config.optimizer.learning_rate, config.policy.ce_coef) == (0.6, 1e-6, 0.03)
        assert (config.reward.advantage, config.features.whitening) == ("rloo", "feature")
        assert config.features.layer_fractions == (0.25, 0.5, 0.75)
    for config in (code, raw):
        assert (config.data.stride, config.data.generate_max_len, config.data.context_length) == (8, 8, 8)
        assert config.features.embed_method == "last_token"
    anchors = (raw.data.sequence_length - 8 - 8) // 8 + 1
    assert anchors == 127 and 1900 < anchors * raw.policy.prompts_per_step < 2100
    assert (translation.data.stride, translation.data.generate_max_len, translation.data.context_length) == (2, 4, 4)
    assert translation.features.embed_method == "completion_mean"


def test_the_validator_is_the_real_one(tmp_path):
    text = (ROOT / "ray_configs" / "two_nodes.yaml").read_text()
    broken = tmp_path / "broken.yaml"
    broken.write_text(text.replace("num_ranks: 8", "num_ranks: 7").replace("zero_stage", "zero_stag"))
    with pytest.raises(ConfigError, match="did you mean deepspeed.zero_stage"):
        load_config(broken)


def test_the_command_in_a_files_header_works():
    header = (ROOT / "ray_configs" / "eight_gpus.yaml").read_text()
    (command,) = re.findall(r"openrlhf-ebft (doctor [^)]*)\)", header)
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf_ebft.cli.main", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert "policy trainer 0-3, rollout engine 0-1, feature network 0-1" in done.stdout, done.stderr
