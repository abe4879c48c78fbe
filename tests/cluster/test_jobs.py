"""Training as Ray jobs on a real head node with token authentication: success, failure, two at once, stopping."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from openrlhf_ebft.config import load_config
from openrlhf_ebft.trainer.checkpoints import CheckpointStore
from tests.cluster.ray_nodes import BIN, Cluster
from tests.processes import ROOT
from tests.trainer import runs
from tests.trainer.victims import offspring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

# The sampler that starts in a second; vLLM has tests of its own.
QUICK = {"engine": "transformers"}
SMALL = {
    "trainer_cpus": 0.5,
    "rollout_cpus": 0.25,
    "feature_cpus": 0.25,
    "aggregator_cpus": 0.1,
    "start_timeout_s": 500.0,  # ten processes load their libraries at once, on as few as two cores
}


def write(work: Path, name: str, **sections) -> str:
    sections = {"rollout": QUICK, "evaluation": {"max_examples": 0}, **sections}
    sections["placement"] = SMALL | sections.get("placement", {})
    return runs.write_config(work, name, **sections).name


def arguments(work: Path, job: str, *command: str) -> list[str]:
    """What a user gives to `ray job submit`, with this repository's runtime environment."""
    environment = str(ROOT / "ray_configs" / "runtime_env.yaml")
    return ["--submission-id", job, "--runtime-env", environment, "--working-dir", str(work), "--", *command]


def train(cluster: Cluster, work: Path, name: str, *flags: str):
    return cluster.submit(*arguments(work, name, "openrlhf-ebft", "train", *flags))


def last_log_line(cluster: Cluster, job: str) -> str:
    logs = cluster.run("ray", "job", "logs", "--address", cluster.url, "--log-color", "false", job).stdout
    return re.sub(r"\x1b\[[0-9;]*m", "", logs).strip().splitlines()[-1]


def status(cluster: Cluster, job: str) -> str:
    """`succeeded`, `failed` or `stopped`, as `ray job status` says it."""
    shown = cluster.run("ray", "job", "status", "--address", cluster.url, job)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout + shown.stderr)
    found = re.search(rf"Job '{job}' (?:was )?(\w+)", text)
    assert found, text
    return found[1]


def actors(cluster: Cluster) -> list[str]:
    """Command lines of all actors of runs on the cluster."""
    family = [line for node in cluster.nodes for line in offspring(node.process.pid).values()]
    return [line for line in family if re.search(r"ray::(PolicyTrainer|RolloutEngine|FeatureNetwork|Reward)", line)]


def wait_until(condition, timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def test_a_run_beside_another_succeeds_and_the_other_can_be_stopped_and_gone_on_from(cluster, work):
    """Two runs on one cluster at once: the short one ends whole while the long one goes on, which is then stopped."""
    long_config = write(work, "long", policy={"max_steps": 2000}, checkpoint={"on_interrupt": True})
    long = train(cluster, work, "long", long_config)
    metrics = work / "runs" / "long" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"ebft"' in metrics.read_text(), 450, "no EBFT step")

    short = train(cluster, work, "short", write(work, "short"))
    output = short.communicate(timeout=450)[0]
    assert short.returncode == 0, output
    assert long.poll() is None, "the long run ended before the short one"
    for text in ("policy trainer is up", "ebft 3/3", f"generate: openrlhf-ebft generate {work}/runs/short/model"):
        assert text in output
    assert status(cluster, "short") == "succeeded"
    folder = work / "runs" / "short"
    assert {"config.yaml", "metrics.jsonl", "model"} <= {path.name for path in folder.iterdir()}
    assert len(runs.read_metrics(work, "short")) >= 5
    assert (folder / "model" / "model.safetensors").is_file()

    stopped = cluster.run("ray", "job", "stop", "--address", cluster.url, "long")
    output = long.communicate(timeout=60)[0]
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert status(cluster, "long") == "stopped"
    assert "checkpoint: " in output
    wait_until(lambda: not actors(cluster), 20, "actors are left")
    folder = work / "runs" / "long"
    checkpoint = CheckpointStore(folder / "checkpoints", load_config(folder / "config.yaml"), print).required()
    done = checkpoint.state.step
    assert 2 < done < 2002
    assert done == max(record["step"] for record in runs.read_metrics(work, "long"))
    # Everything has been given back.
    free = cluster.run("openrlhf-ebft", "doctor", "--address", cluster.address)
    assert "node 0: 4 CPU, 0 GPU free" in free.stdout, free.stdout + free.stderr


def test_the_last_line_of_a_failed_job_says_what_failed(cluster, work):
    too_large = write(work, "too_large", placement={"trainer_cpus": 64.0})
    misspelt = write(work, "misspelt", policy={"max_step": 3})
    jobs = {
        "too_large": train(cluster, work, "too_large", too_large),
        "misspelt": train(cluster, work, "misspelt", misspelt),
    }
    last = {
        "too_large": "no node has room left for a policy trainer (64 CPU, 0 GPU)",
        "misspelt": "policy.max_step: unknown key; did you mean policy.max_steps?",
    }
    for name, process in jobs.items():
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 1, output
        assert last[name] in last_log_line(cluster, name)
        assert "Traceback" not in output
        assert status(cluster, name) == "failed"
    assert not (work / "runs" / "too_large").exists()


def test_a_client_without_the_token_is_turned_away(cluster):
    environment = cluster.environment | {"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "wrong"}
    listed = subprocess.run(
        [BIN / "ray", "job", "list", "--address", cluster.url], env=environment, capture_output=True, text=True
    )
    assert listed.returncode != 0
    environment.pop("RAY_AUTH_MODE")
    doctor = subprocess.run(
        [BIN / "openrlhf-ebft", "doctor", "--address", cluster.address], env=environment, capture_output=True, text=True
    )
    assert doctor.returncode == 2
    assert f"the Ray cluster {cluster.address} could not be joined" in doctor.stderr
    assert "export RAY_AUTH_MODE=token" in doctor.stderr
    assert "Traceback" not in doctor.stderr
