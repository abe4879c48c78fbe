"""Runs many configurations, on this machine or as Ray jobs, and goes on where it stopped.

A sweep keeps no state of its own: a run whose model is in its directory is finished, and any other is started with
`train --resume auto`, which goes on from its newest checkpoint. So a sweep that ended half-way is given again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from openrlhf_ebft.config import load_config
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.run_directory import RunDirectory

Outcome = Literal["finished before", "finished", "failed", "interrupted"]

_POLL_S = 1.0
_STOP_WAIT_S = "600"  # for a job to finish its step and save after `ray job stop`; Ray's own is 3
_GRACE_S = 60.0  # for a local run to end its actors after an interrupt


@dataclass(frozen=True)
class SweepRun:
    """One configuration of a sweep."""

    path: Path
    config: EBFTConfig

    @property
    def is_finished(self) -> bool:
        """Whether its run directory holds the final model of this very configuration."""
        folder = RunDirectory.of(self.config)
        return folder.model.is_dir() and folder.saved_config() == self.config

    @property
    def command(self) -> list[str]:
        """Arguments of `openrlhf-ebft` that start it or go on with it."""
        return ["train", str(self.path.resolve()), "--resume", "auto"]


class Launcher(Protocol):
    """Where runs run."""

    def start(self, run: SweepRun) -> Any:
        """Starts a run, or finds the one that is under way; returns a handle."""

    def result(self, handle: Any) -> bool | None:
        """Whether the run ended well; None while it goes on."""

    def output(self, run: SweepRun, handle: Any) -> str:
        """Where the output of a run is read: a file, or a command."""

    def stop(self, handles: Sequence[Any]) -> None:
        """Called when the sweep is interrupted."""


def collect_runs(paths: Sequence[Path]) -> list[SweepRun]:
    """Checks every configuration before anything starts.

    Args:
        paths: files, and folders whose .yaml files are taken by name.
    Raises:
        UserError: no configuration, a faulty one, or two that would write to one run directory.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"no .yaml file in {', '.join(map(str, paths))}")
    runs = [SweepRun(file, load_config(file)) for file in files]
    taken: dict[Path, Path] = {}
    for run in runs:
        folder = RunDirectory.of(run.config).path.resolve()
        if folder in taken:
            raise UserError(f"{taken[folder]} and {run.path} would both write to {folder}: give them different names")
        taken[folder] = run.path
    return runs


def run_sweep(
    runs: Sequence[SweepRun], launcher: Launcher, parallel: int, say: Callable[[str], None]
) -> dict[str, Outcome]:
    """Runs what is not finished, at most `parallel` at a time; returns the outcome of each by name.

    A failed run does not end the sweep. An interrupt does: what runs is stopped, or left to the cluster.
    """
    outcomes: dict[str, Outcome] = {run.config.name: "finished before" for run in runs if run.is_finished}
    waiting = [run for run in runs if run.config.name not in outcomes]
    say(f"{len(runs)} runs: {len(outcomes)} finished before, {len(waiting)} to do, {parallel} at a time")
    active: list[tuple[SweepRun, Any]] = []
    try:
        while waiting or active:
            while waiting and len(active) < parallel:
                run = waiting.pop(0)
                active.append((run, launcher.start(run)))
                say(f"started {run.config.name}, output: {launcher.output(*active[-1])}")
            time.sleep(_POLL_S)
            for run, handle in list(active):
                good = launcher.result(handle)
                if good is not None:
                    active.remove((run, handle))
                    outcomes[run.config.name] = "finished" if good else "failed"
                    say(f"{outcomes[run.config.name]} {run.config.name} ({len(waiting)} wait)")
    except KeyboardInterrupt:
        launcher.stop([handle for _, handle in active])
        outcomes |= {run.config.name: "interrupted" for run in (*(run for run, _ in active), *waiting)}
    return outcomes


class LocalRuns:
    """Runs as processes of this machine; each run's output goes to a file."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, run: SweepRun) -> subprocess.Popen[bytes]:
        """Starts the run in a session of its own, so that an interrupt reaches it once."""
        with self._file(run).open("ab") as log:
            command = [sys.executable, "-m", "openrlhf_ebft.cli.main", *run.command]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def result(self, handle: subprocess.Popen[bytes]) -> bool | None:
        """Good is exit code 0."""
        code = handle.poll()
        return None if code is None else code == 0

    def output(self, run: SweepRun, handle: subprocess.Popen[bytes]) -> str:
        """Its file."""
        return str(self._file(run))

    def _file(self, run: SweepRun) -> Path:
        return self._logs / f"{run.config.name}.log"

    def stop(self, handles: Sequence[subprocess.Popen[bytes]]) -> None:
        """Interrupts the runs and waits until they have ended their actors."""
        for handle in handles:
            handle.terminate()  # what a shell starts in the background ignores SIGINT, and so do its children
        deadline = time.monotonic() + _GRACE_S
        for handle in handles:
            try:
                handle.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                handle.kill()
                handle.wait()


class RayJobs:
    """Runs as jobs of a Ray cluster, which go on when the sweep's own process ends."""

    def __init__(self, address: str, working_dir: str | None = None) -> None:
        """`address`: of the dashboard, such as http://HEAD:8265. Raises UserError when no cluster answers there."""
        from ray.job_submission import JobStatus, JobSubmissionClient

        try:
            self._client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"no Ray cluster answers at {address}: {error}") from None
        self._address = address
        self._under_way = {JobStatus.PENDING, JobStatus.RUNNING}
        self._succeeded = JobStatus.SUCCEEDED
        self._working_dir = working_dir

    def start(self, run: SweepRun) -> str:
        """Submits a job, or finds the one that an earlier sweep left under way."""
        prefix = f"sweep-{run.config.name}-"
        jobs = [job for job in self._client.list_jobs() if (job.submission_id or "").startswith(prefix)]
        for job in jobs:
            number = job.submission_id.removeprefix(prefix)
            if number.isdigit() and job.status in self._under_way:
                return job.submission_id
        numbers = [int(n) for job in jobs if (n := job.submission_id.removeprefix(prefix)).isdigit()]
        environment: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_WAIT_S}}
        if self._working_dir:
            environment["working_dir"] = self._working_dir
        return self._client.submit_job(
            entrypoint=shlex.join(["openrlhf-ebft", *run.command]),
            submission_id=f"{prefix}{max(numbers, default=0) + 1}",
            runtime_env=environment,
        )

    def result(self, handle: str) -> bool | None:
        """Good is the status SUCCEEDED."""
        status = self._client.get_job_status(handle)
        return None if status in self._under_way else status == self._succeeded

    def output(self, run: SweepRun, handle: str) -> str:
        """The command that shows the job's log."""
        return f"ray job logs --address {self._address} {handle}"

    def stop(self, handles: Sequence[str]) -> None:
        """Jobs go on: the cluster holds them, and the same sweep finds them again."""
