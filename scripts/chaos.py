"""Harms real runs of the whole stack and prints what became of them: python -m scripts.chaos [CASE ...].

Every case trains the same tiny model with the same seeds, with real Ray, DeepSpeed and rollout engines, and harms a
process or a file at a random moment. The table says what failed, in which step, after how many seconds the run was
back at work, which work was done twice, and whether metrics and final weights equal those of the run that nothing
happened to. A case that does not end as it should makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from openrlhf_ebft.trainer.console import aligned
from tests.cluster.ray_nodes import Cluster, new_cluster
from tests.processes import ROOT
from tests.trainer import runs, victims

SETTINGS: dict[str, Any] = {
    "policy": {"max_steps": 14, "sft_warmup_steps": 1},
    "evaluation": {"every_steps": 5, "max_examples": 2},
    "checkpoint": {"every_steps": 3, "on_full_disk": "warn"},
    "recovery": {"max_restarts": 8, "backoff_s": 0.5, "heartbeat_s": 5.0},
}
LIMIT_S = 300.0


@dataclass
class Run:
    """One `openrlhf-ebft train` with its output in a file."""

    folder: Path
    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.name}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("a") as output:
            command = [sys.executable, "-m", "openrlhf_ebft.cli.main", "train", *self.arguments]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=output, stderr=output, text=True, start_new_session=True
            )

    @property
    def path(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def output(self) -> str:
        return self.log.read_text()

    def steps(self) -> int:
        """Steps completed so far."""
        metrics = self.path / "metrics.jsonl"
        return max([0, *map(int, re.findall(r'"step": (\d+)', metrics.read_text()))]) if metrics.exists() else 0

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Raises AssertionError when the condition does not come true while the run lives and the limit lasts."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"{what}: the run has ended\n{self.output[-3000:]}"
            assert time.monotonic() < end, f"{what}: not within {LIMIT_S} s\n{self.output[-3000:]}"
            time.sleep(0.02)

    def reach(self, step: int) -> None:
        """Waits for a step and for a random moment of the next one."""
        self.wait_until(lambda: self.steps() >= step, f"step {step}")
        time.sleep(random.uniform(0, 0.6))

    def seconds_until(self, text: str, count: int = 1) -> float:
        """Time until the output holds `text` for the `count`-th time."""
        start = time.monotonic()
        self.wait_until(lambda: self.output.count(text) >= count, text)
        return time.monotonic() - start

    def end(self) -> int:
        return self.process.wait(LIMIT_S)


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    when: str
    recovered_s: float | None
    lost: str
    good: bool = True


class Chaos:
    """The cases. Each harms `run` and returns its outcome; the caller waits for the end and compares."""

    def kill_engine(self, run: Run) -> Outcome:
        return self._harm(run, "RolloutEngineActor", "rollout engine 0 is back", "its requests")

    def kill_feature_network(self, run: Run) -> Outcome:
        return self._harm(run, "FeatureNetworkActor", "feature network 0 is back", "its trees")

    def kill_aggregator(self, run: Run) -> Outcome:
        return self._harm(run, "RewardAggregatorActor", "reward aggregator is back", "the step's rewards")

    def kill_trainer_rank(self, run: Run) -> Outcome:
        return self._harm(run, "PolicyTrainerActor", "the trainer is back", None)

    def hang_engine(self, run: Run) -> Outcome:
        return self._harm(run, "RolloutEngineActor", "rollout engine 0 is back", "its requests", signal.SIGSTOP)

    def hang_trainer_rank(self, run: Run) -> Outcome:
        return self._harm(run, "PolicyTrainerActor", "the trainer is back", None, signal.SIGSTOP)

    def out_of_memory(self, run: Run) -> Outcome:
        """The engine cannot get more memory: the kernel refuses it (RLIMIT_AS), as in a container that is full."""
        step = random.randint(4, 8)
        run.reach(step)
        (pid,) = victims.actors_of(run.process, "RolloutEngineActor")
        resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
        seconds = run.seconds_until("rollout engine 0 is back")
        return Outcome(f"step {step + 1}", seconds, "its requests")

    def kill_driver(self, run: Run) -> Outcome:
        step = random.randint(4, 8)
        run.reach(step)
        run.process.kill()
        run.process.wait()
        done = run.steps()
        run.start()
        seconds = run.seconds_until("resumed after step ")
        (resumed,) = re.findall(r"resumed after step (\d+)", run.output)
        return Outcome(f"step {step + 1}", seconds, f"{done - int(resumed)} steps")

    def damage_checkpoint(self, run: Run) -> Outcome:
        """A byte of the newest checkpoint flips while nobody looks; then the driver is killed."""
        run.wait_until(lambda: (run.path / "checkpoints" / "step-6").exists(), "step-6")
        run.process.kill()
        run.process.wait()
        done = run.steps()
        newest = max((run.path / "checkpoints").glob("step-*[0-9]"), key=lambda path: int(path.name[5:]))
        file = max(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[random.randrange(len(content))] ^= 1
        file.write_bytes(content)
        run.start()
        seconds = run.seconds_until("resumed after step ")
        (resumed,) = re.findall(r"resumed after step (\d+)", run.output)
        return Outcome(
            f"step {done + 1}", seconds, f"{done - int(resumed)} steps", f"passing over {newest}" in run.output
        )

    def full_disk(self, run: Run) -> Outcome:
        """The kernel refuses the trainer's writes (RLIMIT_FSIZE) while a checkpoint is due."""
        run.reach(4)
        (pid,) = victims.actors_of(run.process, "PolicyTrainerActor")
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, before[1]))
        run.seconds_until("could not be written")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        seconds = run.seconds_until("checkpoint: ", 2)
        return Outcome("checkpoint 6", seconds, "one checkpoint")

    def _harm(
        self, run: Run, kind: str, back: str, lost: str | None, number: signal.Signals = signal.SIGKILL
    ) -> Outcome:
        step = random.randint(4, 8)
        run.reach(step)
        victims.harm(run.process, kind, number)
        seconds = run.seconds_until(back)
        if lost is None:
            (redone,) = re.findall(r"(\d+) completed steps are done again", run.output)
            lost = f"{redone} steps"
        return Outcome(f"step {step + 1}", seconds, lost)


def node_environment(cluster: Cluster) -> dict[str, str]:
    return runs.environment() | cluster.environment | {"RAY_ADDRESS": cluster.address}


def kill_node(folder: Path) -> tuple[Run, Outcome]:
    """All actors are on one of two nodes beside the head: that node is lost whole, the other one takes over."""
    cluster = new_cluster()
    try:
        cluster.start_head(cpus=1)
        nodes = [cluster.add_node(cpus=2) for _ in range(2)]
        run = Run(folder, "kill_node", arguments(folder, "kill_node"), node_environment(cluster))
        step = random.randint(4, 8)
        run.reach(step)
        (home,) = [
            node for node in nodes if any("ray::PolicyT" in a for a in victims.offspring(node.process.pid).values())
        ]
        home.kill()
        seconds = run.seconds_until("reward aggregator is back")
        run.end()
        (redone,) = re.findall(r"(\d+) completed steps are done again", run.output)
        return run, Outcome(f"step {step + 1}", seconds, f"{redone} steps")
    finally:
        cluster.stop()


def spend_budget(folder: Path) -> tuple[Run, Outcome]:
    """The engine is killed whenever it is back: past the budget the run ends with one message and exit code 1."""
    run = Run(folder, "spend_budget", arguments(folder, "spend_budget", max_restarts=2), runs.environment())
    run.reach(3)
    for number in range(1, 4):
        victims.harm(run.process, "RolloutEngineActor")
        if number < 3:
            run.seconds_until("rollout engine 0 is back", number)
    code = run.end()
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    good = code == 1 and len(errors) == 1 and "recovery.max_restarts = 2" in errors[0]
    return run, Outcome("step 4", None, f"run ended, exit code {code}", good)


def arguments(folder: Path, name: str, **recovery: int) -> tuple[str, ...]:
    settings = SETTINGS | {"recovery": SETTINGS["recovery"] | recovery}
    return (str(runs.write_config(folder, name, **settings)), "--resume", "auto")


def is_equal(run: Run, straight: Run) -> bool:
    """Metrics without timings, and every weight to the last bit."""
    if runs.read_metrics(run.folder, run.name) != runs.read_metrics(run.folder, straight.name):
        return False
    ours, theirs = (load_file(r.path / "model" / "model.safetensors") for r in (run, straight))
    return all(ours[name].equal(tensor) for name, tensor in theirs.items())


def main() -> int:
    cases = [name for name in vars(Chaos) if not name.startswith("_")]
    alone = {"kill_node": kill_node, "spend_budget": spend_budget}
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos", description="Harm runs and show what became of them."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join([*cases, *alone])}")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random moments; default: a new one")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm", help="rollout engine")
    options = parser.parse_args()
    wanted = options.cases or [*cases, *alone]
    unknown = [name for name in wanted if name not in cases and name not in alone]
    if unknown:
        parser.error(f"unknown case {unknown[0]}: choose from {', '.join([*cases, *alone])}")
    random.seed(options.seed)
    SETTINGS["rollout"] = {"engine": options.engine}
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    runs.write_inputs(folder, rows=30)
    straight = Run(folder, "straight", arguments(folder, "straight"), runs.environment())
    assert straight.end() == 0, straight.output
    rows = [("failure", "in", "recovered", "done twice", "equal result")]
    failed = False
    for name in wanted:
        if name in alone:
            run, outcome = alone[name](folder)
        else:
            run = Run(folder, name, arguments(folder, name), runs.environment())
            outcome = getattr(Chaos(), name)(run)
            run.end()
        ended = run.process.returncode == 0
        equal = is_equal(run, straight) if ended else None
        failed = failed or not outcome.good or (equal is not True and name != "spend_budget")
        seconds = "-" if outcome.recovered_s is None else f"{outcome.recovered_s:.1f} s"
        rows.append((name, outcome.when, seconds, outcome.lost, {True: "yes", False: "NO", None: "-"}[equal]))
        print("  ".join(rows[-1]), flush=True)
    print("\n" + aligned(rows))
    if failed:
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
