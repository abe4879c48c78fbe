"""A failed rollout is repeated or ends the run; nothing is made up in its place (case B53)."""

import os
import signal
import time

import pytest
import ray

from openrlhf_ebft.actors.restarts import Crew, RestartBudget, RestartsSpent
from openrlhf_ebft.actors.rollout_engine import RolloutEngineGroup
from openrlhf_ebft.actors.waiting import ActorError, ActorGone, ActorTimeout, wait_for
from openrlhf_ebft.core.experience import Completion, Rollout, RolloutRequest
from tests.actors.test_placement import make_config
from tests.trees import make_reference

START_S = 90  # other tests may hold the cores while actors load their libraries
REQUESTS = [RolloutRequest(make_reference(8, [4], seed=seed), num_samples=2, seed=seed) for seed in range(5)]


class Engine:
    """Answers with token ids that its number and its calls determine; calls whose number is in `failing` raise."""

    def __init__(self, number, failing=(), error=None):
        self.number, self.failing = number, failing
        self.error = error or RuntimeError("out of blocks")
        self.calls = 0

    def generate(self, requests):
        self.calls += 1
        if self.calls in self.failing:
            raise self.error
        completion = Completion((10 + self.number, 1), (-0.1, -0.2), "stop")
        return [Rollout(r.reference.example_id, ((completion,) * r.num_samples,), self.calls) for r in requests]

    def count(self):
        return self.calls

    def process(self):
        return os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def make_group(*engines, **rollout):
    """A group of actors that run already; a lost one is not replaced."""
    config = make_config(rollout={"num_engines": len(engines), **rollout}, recovery={"max_restarts": 0})
    budget = RestartBudget(config.recovery, print)
    names = [f"rollout engine {number}" for number in range(len(engines))]
    return RolloutEngineGroup(Crew(names, engines.__getitem__, budget, heartbeat_s=60), config)


def start_engine(*arguments):
    return ray.remote(Engine).options(num_cpus=0).remote(*arguments)


@pytest.mark.stack
def test_an_engine_that_fails_every_second_call_gives_every_rollout_once():
    engines = [start_engine(0, (1, 3)), start_engine(1, (2, 4))]
    group = make_group(*engines)
    for _ in range(2):
        rollouts = group.generate(REQUESTS)
        assert [rollout.example_id for rollout in rollouts] == [r.reference.example_id for r in REQUESTS]
        for rollout in rollouts:
            assert len(rollout.completions[0]) == 2
            assert all(completion.token_ids in ((10, 1), (11, 1)) for completion in rollout.completions[0])
    # Only what failed was asked again: each engine failed once in one of its steps.
    assert ray.get([engine.count.remote() for engine in engines], timeout=START_S) == [4, 3]


@pytest.mark.stack
@pytest.mark.parametrize(
    ("error", "calls"),
    [(RuntimeError("out of blocks"), 3), (ValueError("prompt of 9 tokens, limit 8"), 1)],
)
def test_a_failure_that_stays_is_an_error_with_the_engines_words(error, calls):
    engine = start_engine(0, range(1, 100), error)
    with pytest.raises(ActorError, match=f"rollout: rollout engine 0 failed: {type(error).__name__}: {error}"):
        make_group(engine, max_retries=2).generate(REQUESTS)
    assert ray.get(engine.count.remote(), timeout=START_S) == calls


@pytest.mark.stack
def test_a_killed_engine_ends_the_step_at_once():
    engines = [start_engine(0), start_engine(1)]
    os.kill(ray.get(engines[1].process.remote(), timeout=START_S), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RestartsSpent, match="rollout: rollout engine 1 is gone: .*process has died") as caught:
        make_group(*engines).generate(REQUESTS)
    assert isinstance(caught.value.__cause__, ActorGone)
    assert time.monotonic() - start < 10


@pytest.mark.stack
def test_the_limit_of_a_wait_holds_for_all_calls_together():
    engines = [start_engine(number) for number in range(3)]
    wait_for("start", ["a", "b", "c"], [engine.count.remote() for engine in engines], START_S)
    calls = [engine.sleep.remote(seconds) for engine, seconds in zip(engines, (1.5, 3, 30), strict=True)]
    start = time.monotonic()
    with pytest.raises(ActorTimeout, match=r"nap: no answer from engine 2 within 4 s"):
        wait_for("nap", ["engine 0", "engine 1", "engine 2"], calls, 4)
    assert time.monotonic() - start < 6.5, "with a limit for each call it would be 7 s"


@pytest.mark.stack
def test_a_constructors_error_is_told_without_its_traceback():
    class Broken(Engine):
        def __init__(self):
            raise FileNotFoundError("model 'x': no such folder\n  - look there")

    actor = ray.remote(Broken).options(num_cpus=0).remote()
    with pytest.raises(ActorError) as caught:
        wait_for("start", ["feature network 0"], [actor.count.remote()], START_S)
    expected = "start: feature network 0 failed: FileNotFoundError: model 'x': no such folder\n  - look there"
    assert str(caught.value) == expected
