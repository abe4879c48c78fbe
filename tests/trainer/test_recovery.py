"""Runs that lose actors at random moments and end as if nothing had happened."""

import random
import resource
import shutil
import signal
import time

import pytest
from safetensors.torch import load_file

from openrlhf_ebft.trainer.run_directory import RunDirectory
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


def test_a_full_disk_costs_a_checkpoint_and_no_more(folder):
    """The kernel refuses the trainer's writes (EFBIG) for a while; nothing is simulated."""
    settings = SETTINGS | {"checkpoint": {"every_steps": 3, "on_full_disk": "warn"}}
    process = runs.start("train", str(runs.write_config(folder, "full", **settings)))
    run = folder / "runs" / "full"
    victims.wait_for_record(process, run / "metrics.jsonl", '"step": 4')
    (trainer,) = victims.actors_of(process, "PolicyTrainerActor")
    unlimited = resource.prlimit(trainer, resource.RLIMIT_FSIZE)
    resource.prlimit(trainer, resource.RLIMIT_FSIZE, (50_000, unlimited[1]))
    victims.wait_for_record(process, run / "metrics.jsonl", '"step": 7')
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-3"], "the one before must be intact"
    resource.prlimit(trainer, resource.RLIMIT_FSIZE, unlimited)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "checkpoints/step-6 could not be written: save checkpoint: policy trainer rank 0 failed" in output
    assert "the newest checkpoint is still" in output and "MiB free" in output
    check_equal_to_straight(folder, "full")


def copy_of_straight(folder, name):
    """The finished run as it was when its last checkpoint was written."""
    run = folder / "runs" / name
    shutil.copytree(folder / "runs" / "straight", run)
    shutil.rmtree(run / "model")
    return run


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_run_ends_the_same(folder):
    run = copy_of_straight(folder, "damaged")
    file = max((run / "checkpoints" / "step-12").rglob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, output = runs.run("train", "--resume", str(run))
    assert code == 0, output
    assert f"passing over {run}/checkpoints/step-12: trainer/deepspeed/" in output
    assert "has other content than was written" in output and "resumed after step 9" in output
    check_equal_to_straight(folder, "damaged")


def test_a_changed_configuration_is_refused_unless_allowed(folder):
    run = copy_of_straight(folder, "changed")
    config = str(runs.write_config(folder, "changed", **SETTINGS))
    change = ("--optimizer.learning_rate", "0.002", "--rollout.temperature", "0.7", "--recovery.max_restarts", "2")
    code, output = runs.run("train", config, "--resume", "auto", *change)
    assert code == 2, output
    assert "  optimizer.learning_rate: 0.001 in the checkpoint, now 0.002" in output
    assert "  rollout.temperature: 0.6 in the checkpoint, now 0.7" in output
    assert "--allow-config-change" in output and "max_restarts" not in output
    fixed = ("--policy.num_ranks", "2", "--deepspeed.zero_stage", "1", "--policy.micro_batch_size", "1")
    code, output = runs.run("train", config, "--resume", "auto", *fixed, "--allow-config-change")
    assert code == 2, output
    assert "policy.num_ranks: 1 in the checkpoint, now 2" in output and "deepspeed.zero_stage: 0" in output
    assert (run / "config.yaml").read_text() == (folder / "runs" / "straight" / "config.yaml").read_text()
    fewer = folder / "fewer.jsonl"
    fewer.write_text("".join((folder / "pairs.jsonl").read_text().splitlines(keepends=True)[:-4]))
    shutil.copy(folder / "pairs.jsonl", folder / "all.jsonl")
    shutil.copy(fewer, folder / "pairs.jsonl")
    code, output = runs.run("train", config, "--resume", "auto")
    assert code == 2 and "the training rows of data.path" in output, output
    shutil.copy(folder / "all.jsonl", folder / "pairs.jsonl")
    code, output = runs.run("train", config, "--resume", str(run), *change, "--allow-config-change")
    assert code == 0, output
    before, after = runs.read_metrics(folder, "straight"), runs.read_metrics(folder, "changed")
    rates = {record["step"]: record["learning_rate"] for record in after if "learning_rate" in record}
    assert (rates[12], rates[13]) == (0.001, 0.002)
    assert [r for r in after if r["step"] < 13] == [r for r in before if r["step"] < 13]
    assert (run / "config-until-step-12.yaml").exists() and "0.002" in (run / "config.yaml").read_text()


def test_two_processes_do_not_work_in_one_run_directory(folder):
    run = copy_of_straight(folder, "held")
    holder = RunDirectory(run)
    holder.lock()
    code, output = runs.run("train", "--resume", str(run))
    assert code == 2 and f"another process works in {run}" in output
