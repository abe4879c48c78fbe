"""Checkpoints and resumed runs (cases B13 and B14)."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from openrlhf_ebft.actors.waiting import ActorError, StateLost
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.data.batches import DataCursor
from openrlhf_ebft.trainer.checkpoints import CheckpointError, CheckpointStore
from openrlhf_ebft.trainer.state import TrainerState
from tests.processes import ROOT
from tests.trainer import runs


def write_part(folder):
    (folder / "rank-0.bin").write_bytes(b"weights" * 100)


def fail_after_the_first_file(folder):
    write_part(folder)
    raise StateLost("rank 0 is gone")


def state_of(step):
    return TrainerState(step=step, cursor=DataCursor(1, 24), nonfinite_total=1)


def make_store(folder, said=None, **checkpoint):
    config = EBFTConfig(name="run", model={"path": "m"}, data={"path": "d"}, checkpoint=checkpoint)
    return CheckpointStore(folder, config, (said if said is not None else []).append)


def save(store, step, write=write_part, evaluation=None):
    store.save(state_of(step), write, bytes_needed=lambda: 1000, evaluation=evaluation or {})


def test_a_save_that_dies_leaves_the_one_before(tmp_path):
    said = []
    store = make_store(tmp_path, said)
    save(store, 1)
    with pytest.raises(StateLost):
        save(store, 2, fail_after_the_first_file)
    said.clear()
    assert store.newest().state == state_of(1)
    assert "step-2" in said[0] and "did not finish" in said[0]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest", "manifest digit", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    said = []
    store = make_store(tmp_path, said)
    for step in (1, 2):
        save(store, step)
    file, manifest = tmp_path / "step-2" / "trainer" / "rank-0.bin", tmp_path / "step-2" / "manifest.json"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "flip":
        file.write_bytes(b"W" + file.read_bytes()[1:])
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    said.clear()
    assert store.newest().state.step == 1
    assert "passing over" in said[0] and "step-2" in said[0]


def test_old_checkpoints_go_and_nothing_is_an_error(tmp_path):
    store = make_store(tmp_path, keep_last=2)
    with pytest.raises(UserError, match="no complete checkpoint"):
        store.required()
    for step in (8, 9, 10, 11):
        save(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11"]


def test_a_checkpoint_just_written_stays_beside_damaged_ones_with_higher_numbers(tmp_path):
    store = make_store(tmp_path, keep_last=1)
    save(store, 9)
    (tmp_path / "step-9" / "trainer" / "rank-0.bin").unlink()
    save(store, 7)
    assert store.newest().state.step == 7


def begin(store, step, answers, evaluation=None):
    """A save in the background; `answers` are what the ranks will say, one at each look."""
    remaining = iter(answers)

    def is_written():
        answer = next(remaining)
        if isinstance(answer, Exception):
            raise answer
        return answer

    store.save(
        state_of(step), write_part, bytes_needed=lambda: 1000, evaluation=evaluation or {}, is_written=is_written
    )


def look_until_it_ends(store, path):
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
        store.look()


def test_a_checkpoint_in_the_background_is_absent_until_it_is_complete(tmp_path):
    said = []
    store = make_store(tmp_path, said, keep_last=1)
    save(store, 1)
    begin(store, 2, [False, False, True])
    store.look()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2.partial"]
    assert make_store(tmp_path).newest().state.step == 1, "killed now, the run would go on from the one before"
    look_until_it_ends(store, tmp_path / "step-2")
    store.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2"]
    assert store.newest().state == state_of(2) and said[-1] == f"checkpoint: {tmp_path / 'step-2'}"


def test_the_next_checkpoint_and_the_end_wait_for_the_one_that_is_written(tmp_path):
    store = make_store(tmp_path, keep_best=1)
    begin(store, 1, [False, False, True], {"ce": 1.0})
    assert not store.is_among_best({"ce": 2.0}), "the best is known only when it is complete"
    begin(store, 2, [False, True])
    begin(store, 3, [False, True])
    assert store.newest().state.step == 2
    store.finish()
    store.finish()
    assert store.newest().state.step == 3


@pytest.mark.parametrize("on_full_disk", ["error", "warn"])
def test_an_error_of_a_writer_shows_at_the_next_look(tmp_path, on_full_disk):
    """Also with several ranks: none of them waits for the one that failed."""
    said = []
    store = make_store(tmp_path, said, on_full_disk=on_full_disk)
    store._config.policy.num_ranks = 2
    save(store, 1)
    begin(store, 2, [False, ActorError("write checkpoint: rank 1 failed: No space left on device")])
    store.look()
    if on_full_disk == "error":
        with pytest.raises(CheckpointError, match="step-2 could not be written: .*rank 1 failed: No space left"):
            store.look()
    else:
        store.look()
        assert "warning: " in said[-1] and "the newest checkpoint is still" in said[-1]
    store.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize(("answers", "newest"), [([False, StateLost("rank 0 is gone")], 1), ([True], 2)])
def test_ranks_lost_while_they_write(tmp_path, answers, newest):
    """Files that all ranks had written before make a checkpoint; others do not."""
    store = make_store(tmp_path)
    save(store, 1)
    begin(store, 2, answers)
    store.look()
    if newest == 1:
        with pytest.raises(StateLost):
            store.look()
    store.abandon()
    assert store.newest().state.step == newest
    save(store, 3)
    assert store.newest().state.step == 3


@pytest.mark.parametrize(("direction", "kept"), [("lower", [2, 4, 6]), ("higher", [1, 5, 6])])
def test_the_best_checkpoints_stay(tmp_path, direction, kept):
    store = make_store(tmp_path, keep_last=1, keep_best=2, best_metric="cfm", best_direction=direction)
    assert store.is_among_best({"cfm": 0.5}) and not store.is_among_best({}) and not store.is_among_best({"cfm": None})
    values = {1: 0.9, 2: 0.1, 3: math.nan, 4: 0.2, 5: 0.7, 6: None}
    for step, value in values.items():
        save(store, step, evaluation={"cfm": value})
    assert sorted(int(path.name.removeprefix("step-")) for path in tmp_path.iterdir()) == kept
    assert store.is_among_best({"cfm": 0.15 if direction == "lower" else 0.8})
    assert not store.is_among_best({"cfm": 0.3})


def test_a_manifest_names_configuration_versions_and_every_file(tmp_path):
    store = make_store(tmp_path)
    save(store, 4, evaluation={"ce": 1.5})
    manifest = json.loads((tmp_path / "step-4" / "manifest.json").read_text())
    assert manifest["files"]["trainer/rank-0.bin"]["bytes"] == 700
    assert len(manifest["config_sha256"]) == 64 and manifest["config"]["policy"]["num_ranks"] == 1
    assert manifest["libraries"]["torch"] and manifest["evaluation"] == {"ce": 1.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume")
    runs.write_inputs(path, rows=11)
    return path


@pytest.mark.stack
def test_a_killed_run_is_resumed_by_the_same_command_as_if_it_had_not_died(folder):
    """Started, resumed and found finished by one command. Killed at a moment of the second half; epochs are shorter
    than the run, so batches cross their edges."""
    settings = {
        "policy": {"max_steps": 6, "sft_warmup_steps": 2, "prompts_per_step": 4, "micro_batch_size": 2},
        "checkpoint": {"every_steps": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1},
        "evaluation": {"every_steps": 3, "max_examples": 2},
    }
    code, output = runs.run("train", str(runs.write_config(folder, "straight", **settings)))
    assert code == 0, output
    settings["checkpoint"] |= {"background": True}  # changes nothing but when the files are written
    command = ("train", str(runs.write_config(folder, "killed", **settings)), "--resume", "auto")
    process = runs.start(*command)
    metrics = folder / "runs" / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"step": 5' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    code, output = runs.run(*command)
    assert code == 0, output
    assert "resumed after step" in output
    assert runs.read_metrics(folder, "killed") == runs.read_metrics(folder, "straight")
    straight, killed = (
        load_file(folder / "runs" / name / "model" / "model.safetensors") for name in ("straight", "killed")
    )
    assert all(killed[name].equal(tensor) for name, tensor in straight.items())
    code, output = runs.run(*command)
    assert code == 0 and "is finished" in output, output


@pytest.mark.stack
def test_an_interrupt_saves_a_checkpoint_when_asked(folder):
    config = runs.write_config(
        folder,
        "asked",
        policy={"objective": "sft", "max_steps": 100000, "sft_warmup_steps": 0},
        evaluation={"max_examples": 0},
        checkpoint={"on_interrupt": True, "background": True},
    )
    process = runs.start("train", str(config))
    metrics = folder / "runs" / "asked" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"sft"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    checkpoint = make_store(folder / "runs" / "asked" / "checkpoints").newest()
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert checkpoint.state.step == last["step"]


@pytest.mark.parametrize("on_full_disk", ["error", "warn"])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, on_full_disk):
    """On a real file system of 1 MiB: found before writing, and when the first write fails (ENOSPC)."""
    command = f"{sys.executable} -m tests.trainer.full_disk {tmp_path} {on_full_disk}"
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {command}"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount], cwd=ROOT, capture_output=True, text=True
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine lets no test mount a file system: {done.stderr}")
    assert done.returncode == 0, done.stderr


def test_resume_takes_no_other_configuration(folder, tmp_path):
    code, output = runs.run("train", "--resume", str(tmp_path))
    assert code == 2 and "no config.yaml" in output
    code, output = runs.run("train", "--resume", str(tmp_path), "--seed", "5")
    assert code == 2 and "leave out --seed 5" in output
