"""The budget of restarts, and crews of real actors that are killed, stopped or cannot come back."""

import ctypes
import os
import re
import signal
import time

import pytest
import ray
import torch

from openrlhf_ebft.actors.pulse import start_pulse
from openrlhf_ebft.actors.restarts import Crew, RestartBudget, RestartsSpent
from openrlhf_ebft.actors.waiting import ActorError, ActorGone, StateLost, memory_report
from openrlhf_ebft.config.durability import RecoveryConfig


class Clock:
    def __init__(self):
        self.now = 100.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def make_budget(clock, **settings):
    said = []
    return RestartBudget(RecoveryConfig(**settings), said.append, clock=clock, sleep=clock.sleep), said


def test_waits_double_up_to_their_limit_and_the_budget_ends():
    clock = Clock()
    budget, said = make_budget(clock, max_restarts=4, backoff_s=2.0, max_backoff_s=7.0)
    for _ in range(4):
        budget.spend(ActorGone("rollout: rollout engine 1 is gone"))
    assert clock.slept == [2.0, 4.0, 7.0, 7.0]
    assert said[0] == "recovery: rollout: rollout engine 1 is gone; restart 1 of 4 in 2 s"
    with pytest.raises(RestartsSpent, match="engine 1 is gone; 4 restarts within recovery.window_s = 3600 s") as caught:
        budget.spend(ActorGone("rollout: rollout engine 1 is gone"))
    assert "recovery.max_restarts = 4" in str(caught.value)


def test_old_restarts_are_forgotten_only_when_the_run_got_further():
    clock = Clock()
    budget, _ = make_budget(clock, max_restarts=1, backoff_s=0.0, window_s=50.0)
    budget.spend(ActorGone("x"))
    clock.now += 60
    with pytest.raises(RestartsSpent):
        budget.spend(ActorGone("x"))
    budget.reached(1)
    budget.spend(ActorGone("x"))
    budget.reached(2)
    with pytest.raises(RestartsSpent):
        budget.spend(ActorGone("within the window"))


def test_no_restart_is_made_when_none_is_allowed():
    budget, _ = make_budget(Clock(), max_restarts=0)
    with pytest.raises(RestartsSpent, match="x; recovery.max_restarts = 0 allows no restart"):
        budget.spend(ActorGone("x"))


def test_what_ray_says_of_a_full_node_is_cut_to_its_figures():
    """The text is the beginning of what a machine that was really full gave."""
    text = (
        "4 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 40f4) "
        "was 22.68GB used / 23.54GB limit (0.963444)\nOOM kill reason: Memory usage 24015777792B exceeded threshold ..."
    )
    report = "Ray ended it because its node ran out of memory (IP: 192.0.2.2, 22.68GB used / 23.54GB limit)"
    assert memory_report(text) == report
    assert memory_report("The actor died unexpectedly before finishing this task.") == ""


@pytest.mark.parametrize(
    ("cause", "is_loss"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_an_actor_without_memory_counts_as_lost(cause, is_loss):
    assert ActorError("train: rank 0 failed", cause).is_loss == is_loss


class Worker:
    def __init__(self, number, doomed=False, silent_s=0.0):
        start_pulse()
        if doomed:
            os._exit(1)
        if silent_s:
            time.sleep(0.5)  # a first sign of life
            ctypes.PyDLL(None).usleep(int(silent_s * 1e6))  # with Python's global lock, as a library that is loaded
        self.number = number

    def work(self, seconds=0.0):
        time.sleep(seconds)
        return self.number, os.getpid()

    def fail(self, error):
        raise error


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def make_crew(count, doomed_from=99, silent_s=0.0, **settings):
    """A crew whose actors die while they start, from the `doomed_from`-th start on.

    Those that take the place of lost ones are silent for `silent_s` while they start.
    """
    started = []

    def spawn(number):
        started.append(number)
        silence = silent_s if len(started) > count else 0.0
        return ray.remote(Worker).options(num_cpus=0).remote(number, len(started) > doomed_from, silence)

    said = []
    config = RecoveryConfig(**{"backoff_s": 0.0, "heartbeat_s": 3.0, **settings})
    names = [f"worker {number}" for number in range(count)]
    return Crew(names, spawn, RestartBudget(config, said.append), config.heartbeat_s), said


def call(crew, seconds=0.0):
    def restart(number, failure):
        crew.restart(number, failure, lambda actor: actor.work.remote(), 60)

    calls = {number: lambda actor: actor.work.remote(seconds) for number in range(len(crew))}
    return crew.call("work", calls, 60, restart)


@pytest.mark.stack
@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGKILL, "worker 1 is gone"), (signal.SIGSTOP, "worker 1 hangs: .* for 3 s")]
)
def test_a_lost_actor_is_replaced_and_only_its_call_is_made_again(cluster, number, text):
    silent_s = 4.0 if number == signal.SIGKILL else 0.0  # above the limit, which does not hold for a start
    crew, said = make_crew(2, silent_s=silent_s)
    before = call(crew)
    os.kill(before[1][1], number)
    after = call(crew, seconds=4.0)  # longer than the heartbeat limit: work is no silence
    assert after[0] == before[0], "the one that lived must have answered itself"
    assert after[1][0] == 1 and after[1][1] != before[1][1]
    (loss,) = [line for line in said if "restart 1 of" in line]
    assert re.search(text, loss), loss
    assert said[-1].startswith("recovery: worker 1 is back after ")


@pytest.mark.stack
def test_an_actor_that_cannot_come_back_spends_the_budget(cluster):
    crew, said = make_crew(1, doomed_from=1, max_restarts=2)
    os.kill(call(crew)[0][1], signal.SIGKILL)
    with pytest.raises(RestartsSpent, match="worker 0 is gone.*recovery.max_restarts = 2"):
        call(crew)
    assert len(said) == 2


@pytest.mark.stack
def test_a_broken_connection_is_told_by_the_peer_behind_it(cluster):
    """The rank that lives fails first, with a connection error; the cause is the one that died."""
    crew, _ = make_crew(2)
    pids = call(crew)
    failure = ActorError("train: worker 0 failed: RuntimeError: Connection closed by peer", RuntimeError())
    assert crew.loss_behind(failure) is failure, "all live: the failure stays what it is"
    os.kill(pids[1][1], signal.SIGKILL)
    behind = crew.loss_behind(failure)
    assert isinstance(behind, StateLost) and "worker 1 is gone; train: worker 0 failed" in str(behind)
