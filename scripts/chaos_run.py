"""One training run that `scripts.chaos` harms, as a process of its own with its output in a file."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.ray_nodes import Cluster
from tests.processes import ROOT

LIMIT_S = 900.0  # of a whole run, on a busy machine


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    when: str
    recovered_s: float | None
    lost: str
    good: bool = True


@dataclass
class Run:
    """One `openrlhf-ebft train` with its output in a file."""

    folder: Path
    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    cluster: Cluster | None
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

    def redone(self) -> str:
        """What the driver says about work that was lost with the trainer."""
        return f"{re.findall(r'([0-9]+) completed steps are done again', self.output)[-1]} steps"

    def restart(self) -> Outcome:
        """Gives the command of a run whose driver is dead once more."""
        done = self.steps()
        self.start()
        seconds = self.seconds_until("resumed after step ")
        resumed = int(re.findall(r"resumed after step (\d+)", self.output)[-1])
        return Outcome(f"step {done + 1}", seconds, f"{done - resumed} steps")

    def kill(self) -> None:
        """Kills the driver; its actors end by themselves, on a local Ray with the whole cluster."""
        self.process.kill()
        self.process.wait()
