"""Runs generated programs in a locked-down process each, with limits on time, memory, output and files.

Layers, each used where the kernel grants it: namespaces (processes, network, mounts, users), a small file system in
memory, Landlock (files), no capabilities, seccomp (system calls), resource limits, an empty environment, a session of
its own. A machine without seccomp is refused; every other layer that is missing is named with the kernel's reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openrlhf_ebft.config.errors import UserError

Verdict = Literal["passed", "failed", "timeout", "memory", "output", "killed"]

_ROOT = Path(__file__).resolve().parents[2]
_START = """import sys
sys.path.insert(0, sys.argv[1])
from openrlhf_ebft.evaluation.confinement.launcher import main
main(int(sys.argv[2]))
"""
_START_LIMIT_S = 20.0  # for the interpreter to be ready; a loaded machine takes long
_REPORT_LIMIT = 65536  # bytes


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use."""

    time_s: float = 10.0  # of wall clock, and about as much of a core
    memory_mib: int = 512  # of address space, the interpreter's included
    output_kib: int = 256  # of standard output and error together
    scratch_mib: int = 16  # of files in its folder


@dataclass(frozen=True)
class ProgramResult:
    """How one program ended."""

    outcome: Verdict  # output: it printed more than allowed; killed: a signal ended it, such as the CPU limit's
    detail: str  # the exception's name and text, or the signal
    seconds: float
    applied: tuple[str, ...]  # layers in force
    missing: dict[str, str]  # layers that are not, with the reason


def run_program(
    program: str, limits: SandboxLimits | None = None, *, without: frozenset[str] = frozenset()
) -> ProgramResult:
    """Runs a Python program to its end, or to a limit. It passes if it gets to its last line without an exception.

    Args:
        program: source text.
        limits: what it may use.
        without: layers to leave out: `namespaces`, `landlock`; what is left must hold.
    Raises:
        UserError: this machine cannot confine the program.
    """
    limits = limits or SandboxLimits()
    if sys.platform != "linux":
        raise UserError(
            f"generated code is run on Linux only, this is {sys.platform}: set evaluation.execute_code false"
        )
    with tempfile.TemporaryDirectory(prefix="openrlhf-ebft-program-") as folder:
        job = {
            "program": program,
            "folder": folder,
            "token": secrets.token_hex(16),
            "memory_bytes": limits.memory_mib * 2**20,
            "cpu_s": math.ceil(limits.time_s) + 1,
            "scratch_bytes": limits.scratch_mib * 2**20,
            "without": sorted(without),
        }
        return _run(job, limits)


def _run(job: dict[str, Any], limits: SandboxLimits) -> ProgramResult:
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _START, str(_ROOT), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=job["folder"],
            env=_environment(job["folder"]),
            pass_fds=(write_end,),
            start_new_session=True,
        )
    finally:
        os.close(write_end)
    try:
        with contextlib.suppress(BrokenPipeError):  # a launcher that could not start says why below
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        return _Watch(process, read_end, job["token"], limits).result()
    finally:
        os.close(read_end)
        _end(process)


class _Watch:
    """Reads what the program prints and what the launcher reports, until the end or a limit."""

    def __init__(self, process: subprocess.Popen[bytes], report: int, token: str, limits: SandboxLimits) -> None:
        self._process, self._limits, self._token = process, limits, token
        self._handles = {process.stdout.fileno(): bytearray(), report: bytearray()}
        self._output, self._report = self._handles.values()
        self._begin = time.monotonic()
        self._isolation: dict[str, Any] | None = None

    def result(self) -> ProgramResult:
        """Waits; raises UserError when the process could not be confined, or not even be started."""
        stopped = self._read()
        seconds = time.monotonic() - self._begin
        isolation = self._require_isolation()
        if stopped is None:
            stopped = self._verdict()
        return ProgramResult(*stopped, seconds, tuple(isolation["applied"]), isolation["missing"])

    def _read(self) -> tuple[Verdict, str] | None:
        """Reads until both ends are closed (None), or until a limit is reached."""
        with selectors.DefaultSelector() as selector:
            for handle in self._handles:
                selector.register(handle, selectors.EVENT_READ)
            while selector.get_map():
                limit = self._limits.time_s if self._isolation else _START_LIMIT_S
                left = self._begin + limit - time.monotonic()
                if left <= 0:
                    return "timeout", f"no end within {limit:g} s"
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    self._handles[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                if len(self._output) > self._limits.output_kib * 1024:
                    return "output", f"more than {self._limits.output_kib} KiB of output"
                if len(self._report) > _REPORT_LIMIT:
                    return "failed", "wrote to handles that are not its own"
                self._note_isolation()
        return None

    def _note_isolation(self) -> None:
        if self._isolation is None and b"\n" in self._report:
            self._isolation = json.loads(self._report.partition(b"\n")[0])["isolation"]
            self._begin = time.monotonic()  # the program's time starts here

    def _require_isolation(self) -> dict[str, Any]:
        if self._isolation is None:
            text = bytes(self._output[-2000:]).decode(errors="replace")
            raise UserError(f"the process for generated code did not start: {text or 'no output'}")
        reason = self._isolation["missing"].get("seccomp")
        if reason is not None:
            raise UserError(
                f"this machine cannot confine generated code ({reason}): run the evaluation on another machine, or set "
                "evaluation.execute_code to false"
            )
        return self._isolation

    def _verdict(self) -> tuple[Verdict, str]:
        for line in self._report.splitlines()[1:]:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # not the launcher's: the program guessed the handle
            if isinstance(record, dict) and record.get("token") == self._token:
                return _checked(record)
        try:
            code = self._process.wait(max(0.0, self._begin + self._limits.time_s - time.monotonic()))
        except subprocess.TimeoutExpired:  # it closed its handles and goes on
            return "timeout", f"no end within {self._limits.time_s:g} s"
        number = -code if code < 0 else code - 128
        if number in set(signal.Signals):
            return "killed", signal.Signals(number).name
        return "failed", f"ended early (exit code {code})"


def _checked(record: dict[str, Any]) -> tuple[Verdict, str]:
    """The launcher's record as (outcome, detail). Not even this one can be trusted: the program runs beside it."""
    outcome = record.get("outcome")
    if outcome not in ("passed", "failed", "memory"):
        return "failed", "wrote to handles that are not its own"
    return outcome, str(record.get("detail"))[:500]


def _environment(folder: str) -> dict[str, str]:
    """Nothing of this process's environment, where keys and tokens may be."""
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {"PATH": "", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **dict.fromkeys(single, "1")}


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
