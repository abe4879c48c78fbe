"""Checkpoints and resumed runs (cases B13 and B14)."""

import json
import os
import signal
import time

import pytest
from safetensors.torch import load_file

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.data.batches import DataCursor
from openrlhf_ebft.trainer.checkpoints import latest_checkpoint, save_checkpoint
from openrlhf_ebft.trainer.state import TrainerState
from tests.trainer import runs


def write_part(folder):
    (folder / "rank-0.bin").write_bytes(b"weights" * 100)


def fail_after_the_first_file(folder):
    write_part(folder)
    raise OSError("disk full")


def state_of(step):
    return TrainerState(step=step, cursor=DataCursor(1, 24), nonfinite_total=1)


def test_a_save_that_dies_leaves_the_one_before(tmp_path):
    save_checkpoint(tmp_path, state_of(1), write_part, keep_last=2)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, state_of(2), fail_after_the_first_file, keep_last=2)
    said = []
    found = latest_checkpoint(tmp_path, said.append)
    assert found.state == state_of(1)
    assert "step-2" in said[0] and "did not finish" in said[0]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    for step in (1, 2):
        save_checkpoint(tmp_path, state_of(step), write_part, keep_last=2)
    file = tmp_path / "step-2" / "trainer" / "rank-0.bin"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "flip":
        file.write_bytes(b"W" + file.read_bytes()[1:])
    elif damage == "remove":
        file.unlink()
    else:
        (tmp_path / "step-2" / "manifest.json").write_text("{")
    said = []
    assert latest_checkpoint(tmp_path, said.append).state.step == 1
    assert "step-2" in said[0]


def test_old_checkpoints_go_and_nothing_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint"):
        latest_checkpoint(tmp_path, print)
    for step in (8, 9, 10, 11):
        save_checkpoint(tmp_path, state_of(step), write_part, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume")
    runs.write_inputs(path, rows=11)
    return path


@pytest.mark.stack
def test_a_killed_run_resumes_as_if_it_had_not_died(folder):
    """Killed at a moment of the second half; epochs are shorter than the run, so batches cross their edges."""
    settings = {
        "policy": {"max_steps": 6, "sft_warmup_steps": 2, "prompts_per_step": 4, "micro_batch_size": 2},
        "checkpoint": {"every_steps": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1},
        "evaluation": {"every_steps": 3, "max_examples": 2},
    }
    code, output = runs.run("train", str(runs.write_config(folder, "straight", **settings)))
    assert code == 0, output
    process = runs.start("train", str(runs.write_config(folder, "killed", **settings)))
    metrics = folder / "runs" / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"step": 5' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    code, output = runs.run("train", "--resume", str(folder / "runs" / "killed"))
    assert code == 0, output
    assert "resumed after step" in output
    assert runs.read_metrics(folder, "killed") == runs.read_metrics(folder, "straight")
    straight, killed = (
        load_file(folder / "runs" / name / "model" / "model.safetensors") for name in ("straight", "killed")
    )
    assert all(killed[name].equal(tensor) for name, tensor in straight.items())


@pytest.mark.stack
def test_an_interrupt_saves_a_checkpoint_when_asked(folder):
    config = runs.write_config(folder, "asked", policy={"max_steps": 100000}, checkpoint={"on_interrupt": True})
    process = runs.start("train", str(config))
    metrics = folder / "runs" / "asked" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"ebft"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    checkpoint = latest_checkpoint(folder / "runs" / "asked" / "checkpoints", print)
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert checkpoint.state.step == last["step"]


def test_resume_takes_no_other_configuration(folder, tmp_path):
    code, output = runs.run("train", "--resume", str(tmp_path))
    assert code == 2 and "no config.yaml" in output
    code, output = runs.run("train", "--resume", str(tmp_path), "--seed", "5")
    assert code == 2 and "leave out --seed 5" in output
