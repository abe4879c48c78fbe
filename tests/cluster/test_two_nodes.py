"""A cluster of two nodes with their own resources: ranks on both, and the loss of one while a run goes on."""

import re
import signal

import pytest

from tests.cluster.test_jobs import actors, last_log_line, train, wait_until, write
from tests.trainer import runs
from tests.trainer.victims import offspring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def ranks_on(node) -> int:
    return sum("ray::PolicyTrainer" in line for line in offspring(node.process.pid).values())


def test_ranks_on_both_nodes_and_a_lost_node_ends_the_run_with_a_clear_message(cluster, work, capsys):
    """Each rank asks for more than half of a node, so that no node can hold both."""
    second = cluster.add_node(cpus=3)
    wait_until(
        lambda: "node 1" in cluster.run("openrlhf-ebft", "doctor", "--address", cluster.address).stdout,
        60,
        "the second node did not join",
    )
    config = write(
        work,
        "two_nodes",
        policy={"num_ranks": 2, "max_steps": 100000, "micro_batch_size": 2},
        placement={"trainer_cpus": 2.5},
        recovery={"max_restarts": 2, "backoff_s": 0.1},
        checkpoint={"every_steps": 2},
    )
    shown = cluster.run("openrlhf-ebft", "doctor", str(work / config), "--address", cluster.address).stdout
    assert len(re.findall(r"policy trainer [01]\b", shown)) == 2, shown
    with capsys.disabled():
        print("\n" + shown[shown.index("placement of") : shown.index("\n\nmemory")])
    job = train(cluster, work, "two_nodes", config)
    metrics = work / "runs" / "two_nodes" / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and '"ebft"' in metrics.read_text(), 450, "no EBFT step")
        assert [ranks_on(node) for node in cluster.nodes] == [1, 1]
        second.kill()
        output = job.communicate(timeout=200)[0]
    finally:
        job.send_signal(signal.SIGTERM)
    assert job.returncode == 1, output
    errors = [line for line in output.splitlines() if "policy trainer rank" in line]
    assert errors, output
    assert "Traceback" not in output
    assert "a node of the cluster is lost" in last_log_line(cluster, "two_nodes")
    wait_until(lambda: not actors(cluster), 30, "actors are left")
    assert len(runs.read_metrics(work, "two_nodes")) > 2
