"""Runs that lose actors at random moments and end as if nothing had happened."""

import random
import signal
import time

import pytest
from safetensors.torch import load_file

from tests.trainer import runs, victims

pytestmark = pytest.mark.stack

KINDS = ("RolloutEngineActor", "FeatureNetworkActor", "RewardAggregatorActor", "PolicyTrainerActor")
SETTINGS = {
    "rollout": {"engine": "transformers"},
    "policy": {"max_steps": 12, "sft_warmup_steps": 1, "num_ranks": 1},
    "evaluation": {"every_steps": 5, "max_examples": 2},
    "checkpoint": {"every_steps": 3},
    "recovery": {"max_restarts": 4, "backoff_s": 0.1, "heartbeat_s": 5.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("recovery")
    runs.write_inputs(path, rows=30)
    code, output = runs.run("train", str(runs.write_config(path, "straight", **SETTINGS)))
    assert code == 0, output
    return path


def check_equal_to_straight(folder, name):
    assert runs.read_metrics(folder, name) == runs.read_metrics(folder, "straight")
    models = [load_file(folder / "runs" / run / "model" / "model.safetensors") for run in ("straight", name)]
    assert all(models[1][key].equal(tensor) for key, tensor in models[0].items())


def test_every_role_is_killed_once_and_the_results_are_those_of_a_run_without_failure(folder):
    """Each at a random moment; the trainer rank last, when there is a checkpoint."""
    process = runs.start("train", str(runs.write_config(folder, "killed", **SETTINGS)))
    metrics = folder / "runs" / "killed" / "metrics.jsonl"
    for step, kind in zip((2, 4, 6, 8), KINDS, strict=True):
        victims.wait_for_record(process, metrics, f'"step": {step}')
        time.sleep(random.uniform(0, 0.5))
        victims.harm(process, kind)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    for name in ("rollout engine 0 is back", "feature network 0 is back", "reward aggregator is back"):
        assert name in output, output
    assert "the trainer is back" in output and "policy trainer rank 0 is gone" in output
    assert "Traceback" not in output
    check_equal_to_straight(folder, "killed")


def test_a_stopped_process_is_found_by_its_missing_heartbeat(folder):
    process = runs.start("train", str(runs.write_config(folder, "stopped", **SETTINGS)))
    metrics = folder / "runs" / "stopped" / "metrics.jsonl"
    victims.wait_for_record(process, metrics, '"step": 4')
    pid = victims.harm(process, "RolloutEngineActor", signal.SIGSTOP)
    start = time.monotonic()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "rollout engine 0 hangs: its process has given no sign of life for 5 s (recovery.heartbeat_s)" in output
    assert time.monotonic() - start < 100
    assert not victims.is_alive(pid)
    check_equal_to_straight(folder, "stopped")
