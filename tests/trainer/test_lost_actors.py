"""Actors that die and clusters that are too small: the command says who and when, ends, and leaves nothing behind."""

import time

import pytest

from tests.trainer import runs, victims

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
        recovery={"max_restarts": 0},
    )
    process = runs.start("train", str(config))
    metrics = folder / "runs" / victim / "metrics.jsonl"
    victims.wait_for_record(process, metrics, '"ebft"')
    processes = victims.offspring(process.pid)
    victims.harm(process, victim)
    start = time.monotonic()
    output, _ = process.communicate(timeout=60)
    took = time.monotonic() - start
    assert process.returncode == 1, output
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert VICTIMS[victim] in message and "is gone" in message, output
    assert "Traceback" not in output
    assert took < 20, f"{took:.1f} s\n{output}"
    victims.check_gone(processes, output)


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
