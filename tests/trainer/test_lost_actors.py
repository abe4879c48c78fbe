"""Actors that die and clusters that are too small: the command says who and when, ends, and leaves nothing behind."""

import os
import signal
import subprocess
import time

import pytest

from tests.trainer import runs

pytestmark = pytest.mark.stack

VICTIMS = {
    "PolicyTrainerActor": "policy trainer rank",
    "FeatureNetworkActor": "feature network 0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lost")
    runs.write_inputs(path)
    return path


def offspring(pid: int) -> dict[int, str]:
    """Descendants of a process, by id: their command lines."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in table.splitlines()[1:]]
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {
            int(r[0]): r[3] for r in rows if int(r[1]) in parents and int(r[0]) not in found and "Z" not in r[2]
        }
        found |= children
        parents = set(children)
    return found


def check_gone(processes: dict[int, str], output: str) -> None:
    """Every process that a run had started has ended, or does so within seconds."""
    deadline = time.monotonic() + 20
    while (left := [pid for pid in processes if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"left behind: {[processes[pid] for pid in left]}\n{output}"


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and "Z" not in state


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_actor_ends_the_run_with_its_name_and_phase(folder, victim):
    """The trainer has two ranks: the one that lives waits for the dead one inside a collective call."""
    config = runs.write_config(
        folder,
        victim,
        rollout={"engine": "transformers"},
        policy={"max_steps": 100000, "sft_warmup_steps": 0, "num_ranks": 2, "micro_batch_size": 1},
        placement={"trainer_cpus": 0.25},
        data={"heldout_fraction": 0.0},
        evaluation={"max_examples": 0},
    )
    process = runs.start("train", str(config))
    metrics = folder / "runs" / victim / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while not (metrics.exists() and '"ebft"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    processes = offspring(process.pid)
    killed = max(pid for pid, arguments in processes.items() if f"ray::{victim}" in arguments)
    os.kill(killed, signal.SIGKILL)
    start = time.monotonic()
    output, _ = process.communicate(timeout=60)
    took = time.monotonic() - start
    assert process.returncode == 1, output
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert VICTIMS[victim] in message and "is gone" in message, output
    assert "Traceback" not in output
    assert took < 20, f"{took:.1f} s\n{output}"
    check_gone(processes, output)


def test_a_cluster_that_is_too_small_is_an_error_that_leaves_nothing(folder):
    """Case B11 on a real cluster."""
    config = runs.write_config(folder, "large", placement={"trainer_cpus": 512.0})
    start = time.monotonic()
    code, output = runs.run("train", str(config), timeout_s=60)
    assert code == 2, output
    assert "policy trainer (512 CPU, 0 GPU)" in output and "available: node 0: " in output
    assert "section placement" in output and "Traceback" not in output
    assert time.monotonic() - start < 45
    assert not (folder / "runs" / "large").exists()


def test_an_address_without_a_cluster_is_an_error_within_seconds(folder):
    config = runs.write_config(folder, "nowhere", placement={"ray_address": "127.0.0.1:9"})
    code, output = runs.run("train", str(config), timeout_s=60)
    assert code == 2, output
    assert "no Ray cluster answers at 127.0.0.1:9" in output and "placement.ray_address" in output
    assert "Traceback" not in output
    assert not (folder / "runs" / "nowhere").exists()


def test_actors_that_start_too_slowly_end_the_run(folder):
    config = runs.write_config(folder, "slow", placement={"start_timeout_s": 0.5})
    code, output = runs.run("train", str(config), timeout_s=90)
    assert code == 1, output
    assert "start (limit: placement.start_timeout_s): no answer from policy trainer rank 0 within 0.5 s" in output
    assert "Traceback" not in output
    assert not (folder / "runs" / "slow").exists()
