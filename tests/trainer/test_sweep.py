"""Sweeps: what is refused before anything starts, what is done, and what is left alone the second time."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest

from openrlhf_ebft.cli.main import main
from openrlhf_ebft.config import ConfigError
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.trainer.sweep import LocalRuns, SweepRun, collect_runs, run_sweep
from tests.processes import ROOT
from tests.trainer import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    runs.write_inputs(folder)
    return folder


@dataclass
class Programs:
    """Real processes in the place of trainings, one program for each name."""

    programs: dict[str, str]
    started: list[str] = field(default_factory=list)
    most: int = 0
    active: int = 0
    stopped: int = 0

    def start(self, run: SweepRun):
        self.started.append(run.config.name)
        self.active += 1
        self.most = max(self.most, self.active)
        return subprocess.Popen([sys.executable, "-c", self.programs[run.config.name]])

    def result(self, handle):
        code = handle.poll()
        self.active -= code is not None
        return None if code is None else code == 0

    def output(self, run, handle):
        return f"process {handle.pid}"

    def stop(self, handles):
        for handle in handles:
            handle.kill()
            handle.wait()
            self.stopped += 1


@pytest.fixture
def interruptible():
    """Programs that a shell starts in the background ignore SIGINT, these tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_failures_do_not_end_a_sweep_and_limits_hold(folder):
    names = [f"limit{i}" for i in range(5)]
    found = collect_runs([runs.write_config(folder, name) for name in names])
    programs = Programs({name: f"raise SystemExit({int(name == 'limit1')})" for name in names})
    outcomes = run_sweep(found, programs, parallel=2, say=lambda text: None)
    assert outcomes == {name: "failed" if name == "limit1" else "finished" for name in names}
    assert programs.started == names
    assert programs.most == 2


def test_an_interrupt_stops_what_runs_and_names_what_waits(folder, interruptible):
    found = collect_runs([runs.write_config(folder, name) for name in ("int0", "int1")])
    programs = Programs(dict.fromkeys(("int0", "int1"), "import time; time.sleep(60)"))

    def say(text):
        if text.startswith("started"):
            os.kill(os.getpid(), signal.SIGINT)

    outcomes = run_sweep(found, programs, parallel=1, say=say)
    assert outcomes == {"int0": "interrupted", "int1": "interrupted"}
    assert programs.stopped == 1


def test_everything_is_checked_before_the_first_run(folder, tmp_path):
    with pytest.raises(UserError, match=r"no \.yaml file"):
        collect_runs([tmp_path])
    good = runs.write_config(folder, "good")
    bad = runs.write_config(folder, "bad", policy={"max_step": 1})
    with pytest.raises(ConfigError, match="max_step"):
        collect_runs([good, bad])
    twin = folder / "twin.yaml"
    twin.write_text(good.read_text())
    with pytest.raises(UserError, match="would both write to"):
        collect_runs([good, twin])


def test_command_lists_and_refuses(folder, tmp_path, capsys):
    path = str(runs.write_config(folder, "listed"))
    assert main(["sweep", path, "--dry-run"]) == 0
    assert "listed  to do" in capsys.readouterr().out
    assert main(["sweep", path, "--parallel", "0"]) == 2
    assert main(["sweep", path, "--working-dir", "."]) == 2
    assert main(["sweep", path, "--ray-jobs", "http://127.0.0.1:9"]) == 2
    assert "no Ray cluster answers" in capsys.readouterr().err


@pytest.mark.stack
def test_local_runs_train_and_are_left_alone_the_second_time(folder):
    sweep = folder / "local"
    sweep.mkdir()
    for name in ("local-a", "local-b"):
        path = runs.write_config(folder, name, rollout={"engine": "transformers"}, policy={"max_steps": 1})
        path.rename(sweep / path.name)
    command = ("sweep", str(sweep), "--logs", str(folder / "logs"))
    code, output = runs.run(*command)
    assert code == 0, output + (folder / "logs" / "local-a.log").read_text()[-3000:]
    assert (folder / "runs" / "local-b" / "model" / "config.json").is_file()
    begin = time.monotonic()
    code, output = runs.run(*command)
    assert code == 0
    assert output.count("finished before") == 3  # the first line, and one for each run
    assert time.monotonic() - begin < 60


def test_local_runs_are_interrupted_and_end(folder):
    launcher = LocalRuns(folder / "logs")
    (run,) = collect_runs([runs.write_config(folder, "ends", policy={"max_steps": 10**6})])
    handle = launcher.start(run)
    assert launcher.output(run, handle) == str(folder / "logs" / "ends.log")
    time.sleep(1.0)
    launcher.stop([handle])
    assert (folder / "logs" / "ends.log").is_file()
    assert handle.poll() is not None
    assert launcher.result(handle) is False


def test_command_of_a_run_is_the_command_line_of_this_version(folder):
    (run,) = collect_runs([runs.write_config(folder, "command")])
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf_ebft.cli.main", *run.command, "--print-config"],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
