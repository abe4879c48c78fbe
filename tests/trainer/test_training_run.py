"""Whole runs of the real stack: Ray, vLLM, DeepSpeed and the feature network with a tiny model."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer import runs

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("training")
    runs.write_inputs(path)
    return path


@pytest.fixture(scope="module")
def first_run(folder):
    code, output = runs.run("train", str(runs.write_config(folder, "first")))
    assert code == 0, output
    return output


def test_a_run_shows_its_steps_and_leaves_everything_behind(folder, first_run):
    for expected in ("sft 2/2", "ebft 3/3", "cross-entropy of the ground truth", "openrlhf-ebft generate"):
        assert expected in first_run
    records = runs.read_metrics(folder, "first", timings=True)
    assert [(r["step"], r["phase"]) for r in records] == [
        (0, "evaluation"),
        (1, "sft"),
        (2, "sft"),
        (3, "ebft"),
        (4, "ebft"),
        (5, "ebft"),
        (5, "evaluation"),
    ]
    steps = [r for r in records if r["phase"] == "ebft"]
    assert [r["rollout/weight_version"] for r in steps] == [2, 3, 4], "rollouts must come from the newest weights"
    for record in steps:
        assert 0 < record["time/train_share"] < 1
        assert record["sampler_mismatch"] < 1e-3, "sampler and trainer must agree about the sampled tokens"
        assert abs(record["reward/mean"] - 2 * record["reward/alignment"] + 2 * record["reward/diversity"]) < 1e-5
    run_folder = folder / "runs" / "first"
    assert (run_folder / "config.yaml").exists()
    settings = json.loads((run_folder / "rollout-settings.json").read_text())
    assert (settings["sampling/temperature"], settings["sampling/top_p"], settings["sampling/top_k"]) == (0.6, 1.0, 0)
    assert list((run_folder / "tensorboard").iterdir())
    model = AutoModelForCausalLM.from_pretrained(run_folder / "model")
    start = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "model")
    assert tokenizer("the cat")["input_ids"]


def test_the_same_seed_gives_the_same_steps_however_often_they_are_evaluated_and_another_seed_others(folder, first_run):
    settings = {"again": (3, 1), "other": (4, 2)}
    for name, (seed, every) in settings.items():
        config = runs.write_config(
            folder,
            name,
            seed=seed,
            evaluation={"max_examples": 2, "every_steps": every},
            rollout={"sync_every_steps": every},
        )
        code, output = runs.run("train", str(config), "--evaluation.max_examples", "4")
        assert code == 0, output
    first, again, other = (runs.read_metrics(folder, name) for name in ("first", "again", "other"))
    between = [r for r in again if r["phase"] == "evaluation"][1:-1]
    assert [r["step"] for r in between] == [3, 4]
    assert [r for r in again if r not in between] == first
    assert [r["loss"] for r in other if "loss" in r] != [r["loss"] for r in first if "loss" in r]
    versions = [r["rollout/weight_version"] for r in other if r["phase"] == "ebft"]
    assert versions == [2, 2, 4], "the engines get new weights after every second EBFT step"


def test_two_of_everything_gives_the_run_of_one_of_each(folder, first_run):
    """2 engines, 2 feature replicas and 2 ranks only cut the work differently: same seeds, same samples."""
    config = runs.write_config(
        folder,
        "double",
        rollout={"num_engines": 2},
        features={"num_replicas": 2},
        policy={"num_ranks": 2, "micro_batch_size": 1},
        deepspeed={"zero_stage": 2},
        placement={"trainer_cpus": 0.25, "rollout_cpus": 0.25, "feature_cpus": 0.25},
    )
    code, output = runs.run("train", str(config))
    assert code == 0, output
    for record, expected in zip(runs.read_metrics(folder, "double"), runs.read_metrics(folder, "first"), strict=True):
        for key, value in expected.items():
            if key != "completion/cached_token_share":  # each engine has a prefix cache of its own
                close = pytest.approx(value, abs=2e-3, rel=2e-3) if isinstance(value, float) else value
                assert record[key] == close, key


def test_evaluation_of_the_trained_model_equals_the_last_one_of_its_run(folder, first_run):
    command = [sys.executable, "-m", "openrlhf_ebft.cli.main", "evaluate", str(folder / "first.yaml")]
    command += ["--model", str(folder / "runs" / "first" / "model")]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    last = runs.read_metrics(folder, "first")[-1]
    measured = json.loads(done.stdout)  # nothing else goes to standard output
    assert measured["examples"] == 4
    assert measured["completions"] == 12
    assert {"ce", "alignment", "reward", "reward_best_of_n", "ngram_overlap", "perplexity"} <= set(measured["metrics"])
    for key, entry in measured["metrics"].items():
        assert entry["value"] == pytest.approx(last[key], abs=1e-4), key
        assert entry["low"] <= entry["value"] + 1e-12 <= entry["high"] + 2e-12, key
        assert entry["count"] == 4
    for key, value in measured["completion"].items():
        assert value == pytest.approx(last[f"completion/{key}"], abs=1e-4), key


def test_an_existing_run_directory_is_not_overwritten(folder, first_run):
    code, output = runs.run("train", str(folder / "first.yaml"))
    assert code == 2
    assert "logging.existing_run" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_at_any_moment_leaves_no_process_behind(folder, number):
    name = f"interrupted-{number.name}"
    config = runs.write_config(folder, name, policy={"max_steps": 100000})
    process = runs.start("train", str(config))
    time.sleep(random.uniform(6, 40))
    assert session_of(process.pid), "the command has ended by itself"
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=60)
    # While Python imports and while Ray starts, its own handling of the signal ends the process.
    assert process.returncode in (130, -number), output
    assert "Traceback" not in output
    deadline = time.monotonic() + 30
    while (left := session_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"left behind: {left}\n{output}"


def session_of(pid: int) -> list[str]:
    """Living processes of the session that a command leads, as `pid arguments`, and those of the Ray that it started.

    Ray's processes and their workers stay in the session of the command; its folder is named after the command.
    """
    table = subprocess.run(["ps", "-eo", "pid,sid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in table.splitlines()[1:]]
    ray_folder = re.compile(rf"/session_[\d_-]+_{pid}/")
    found = [r for r in rows if "Z" not in r[2] and (int(r[1]) == pid or ray_folder.search(r[3]))]
    return [f"{row[0]} {row[3]}" for row in found]
