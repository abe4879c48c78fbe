"""A sweep as Ray jobs on a real cluster: a failure does not end it, and giving it again does what is left."""

import pytest
import yaml

from tests.cluster.test_jobs import SMALL, status
from tests.trainer import runs

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def test_jobs_of_a_sweep(cluster, work):
    folder = work / "sweep"
    folder.mkdir()
    for name, ce in (("sweep-a", 0.0), ("sweep-b", 0.1)):
        path = runs.write_config(
            work, name, rollout={"engine": "transformers"}, placement=SMALL, policy={"max_steps": 1, "ce_coef": ce}
        )
        path.rename(folder / path.name)
    good = (folder / "sweep-b.yaml").read_text()
    broken = yaml.safe_load(good)
    broken["data"]["path"] = str(work / "nothing.jsonl")
    (folder / "sweep-b.yaml").write_text(yaml.safe_dump(broken))

    command = ["openrlhf-ebft", "sweep", str(folder), "--ray-jobs", cluster.url]
    first = cluster.run(*command, "--parallel", "2", timeout_s=280)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "finished  sweep-a" in first.stdout
    assert "failed  sweep-b" in first.stdout
    assert f"started sweep-b, output: ray job logs --address {cluster.url} sweep-sweep-b-1\n" in first.stdout
    assert status(cluster, "sweep-sweep-a-1") == "succeeded"
    assert status(cluster, "sweep-sweep-b-1") == "failed"

    (folder / "sweep-b.yaml").write_text(good)
    second = cluster.run(*command, timeout_s=280)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "finished before  sweep-a" in second.stdout
    assert "finished  sweep-b" in second.stdout
    assert status(cluster, "sweep-sweep-b-2") == "succeeded"
    jobs = cluster.run("ray", "job", "list", "--address", cluster.url)
    assert "'RAY_JOB_STOP_WAIT_TIME_S': '600'" in jobs.stdout + jobs.stderr  # a stopped job has time to save
