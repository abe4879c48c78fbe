"""The shell scripts of examples/scripts: shellcheck finds nothing, and their dry runs check a real configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from openrlhf_ebft import __version__
from tests.processes import ROOT

SCRIPTS = ROOT / "examples" / "scripts"
BIN = Path(sys.executable).parent
NAMES = sorted(path.name for path in SCRIPTS.glob("*.sh"))
TRAINING = ["train_ebft_structured.sh", "train_ebft_strided.sh", "train_ebft_lora.sh", "train_ebft_slurm.sh"]


def run(name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DRY_RUN": "1", **settings}
    return subprocess.run(
        [SCRIPTS / name, *arguments], env=environment, capture_output=True, text=True, timeout=120, cwd="/"
    )


def printed_config(output: str) -> dict:
    """The YAML that --print-config writes stands before the doctor's first line."""
    text = output.partition("\nversion   ")[0]
    return yaml.safe_load(text[text.index("name: ") :])


def test_the_scripts_are_those_of_the_documentation():
    assert set(NAMES) == {*TRAINING, "serve_rad.sh", "docker_run.sh", "common.sh"}


@pytest.mark.parametrize("name", NAMES)
def test_shellcheck_finds_nothing(name):
    done = subprocess.run([BIN / "shellcheck", "--external-sources", SCRIPTS / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(SCRIPTS / name, os.X_OK) == (name != "common.sh")


def test_shellcheck_would_find_something(tmp_path):
    (tmp_path / "bad.sh").write_text('#!/bin/bash\nrm -rf "$FOLDER/"$1\n')
    assert subprocess.run([BIN / "shellcheck", tmp_path / "bad.sh"], capture_output=True).returncode == 1


@pytest.mark.parametrize(
    ("name", "settings", "config", "layout"),
    [
        ("train_ebft_structured.sh", {}, "eight_gpus", "policy trainer 0-3, rollout engine 0-1"),
        (
            "train_ebft_structured.sh",
            {"CONFIG": "ray_configs/single_gpu.yaml", "GPUS_PER_NODE": "1"},
            "single_gpu",
            "take turns",
        ),
        ("train_ebft_strided.sh", {}, "qwen2.5_1.5b_unstructured_code", "policy trainer 0-3, rollout engine 0-1"),
        ("train_ebft_lora.sh", {}, "lora", "policy trainer 0-3, rollout engine 0-1"),
        ("train_ebft_slurm.sh", {"NODES": "2"}, "two_nodes", "1     24 of 96     8 of 8"),
    ],
)
def test_dry_runs_check_configuration_and_placement(name, settings, config, layout):
    done = run(name, "--policy.max_steps", "7", RUNS="/shared/runs", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = printed_config(done.stdout)
    assert shown["name"] == config and shown["policy"]["max_steps"] == 7
    assert shown["logging"]["root"] == "/shared/runs"
    assert layout in done.stdout and "no problems found" in done.stdout
    if config == "lora":
        assert (shown["lora"]["rank"], shown["lora"]["alpha"], shown["model"]["path"]) == (
            16,
            32,
            "meta-llama/Llama-3.1-8B",
        )


def test_a_dry_run_of_what_does_not_fit_fails():
    done = run("train_ebft_structured.sh", GPUS_PER_NODE="4")
    assert done.returncode == 1
    assert "no node has room left" in done.stdout
    wrong = run("train_ebft_structured.sh", "--policy.max_step", "7")
    assert wrong.returncode == 2 and "did you mean --policy.max_steps" in wrong.stderr


def test_the_server_script():
    done = run("serve_rad.sh", "--http.port", "9000")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["http"]["port"] == 9000


@pytest.mark.parametrize(
    ("stack", "config"), [("gpu", "ray_configs/eight_gpus.yaml"), ("cpu", "ray_configs/local_cpu.yaml")]
)
def test_the_container_script_names_image_mounts_and_command(stack, config):
    done = run("docker_run.sh", STACK=stack)
    assert done.returncode == 0, done.stdout + done.stderr
    build, command = done.stdout.splitlines()[:2]
    assert f"--file dockerfile/Dockerfile.{stack}" in build
    assert f"openrlhf-ebft:{__version__}-{stack} head openrlhf-ebft train {config}" in command
    assert ("--gpus all" in command) == (stack == "gpu")
    for folder in ("models", "datasets", "runs"):
        assert f"{ROOT}/{folder}:/workspace/{folder}" in command
    assert "no problems found" in done.stdout
