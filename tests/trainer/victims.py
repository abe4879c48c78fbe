"""Finds the actors of a run that is going on, and harms them at a chosen moment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def offspring(pid: int) -> dict[int, str]:
    """Descendants of a process, by id: their command lines."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in table.splitlines()[1:]]
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {
            int(r[0]): r[3] for r in rows if int(r[1]) in parents and int(r[0]) not in found and "Z" not in r[2]
        }
        found |= children
        parents = set(children)
    return found


def actors_of(process: subprocess.Popen[str], kind: str) -> list[int]:
    """Processes of a run's living actors of one class, oldest first."""
    return sorted(pid for pid, arguments in offspring(process.pid).items() if f"ray::{kind}" in arguments)


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and "Z" not in state


def check_gone(processes: dict[int, str], output: str) -> None:
    """Every process that a run had started has ended, or does so within seconds."""
    deadline = time.monotonic() + 20
    while (left := [pid for pid in processes if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"left behind: {[processes[pid] for pid in left]}\n{output}"


def wait_for_record(process: subprocess.Popen[str], metrics: Path, text: str, timeout_s: float = 200) -> None:
    """Returns once a line of the run's metrics.jsonl holds `text`."""
    deadline = time.monotonic() + timeout_s
    while not (metrics.exists() and text in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{metrics} never held {text}"
        time.sleep(0.05)


def harm(process: subprocess.Popen[str], kind: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Sends a signal to the newest actor of a class; returns its process id."""
    pid = actors_of(process, kind)[-1]
    os.kill(pid, number)
    return pid
