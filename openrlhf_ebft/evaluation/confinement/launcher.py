"""The process that runs one program: gives up what it can, says what that was, then executes the program.

Started by `sandbox.run_program`, in a session and a folder of its own, with a job on standard input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf_ebft.evaluation.confinement import kernel, landlock, namespaces, seccomp

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_THREADS = 128
_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")


def main(report_handle: int) -> None:
    """Reads the job, confines this process and runs the program. Never returns.

    Reports lines of JSON at `report_handle`: the layers in force, then how the program ended, with the job's token.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL, "death signal")
    job = json.load(sys.stdin)
    isolation = _isolate(job, report_handle)
    report = os.fdopen(report_handle, "w", encoding="utf-8")
    print(json.dumps({"isolation": isolation}), file=report, flush=True)
    if "seccomp" in isolation["missing"]:
        os._exit(0)  # without it nothing keeps the program from sockets and other processes
    outcome, detail = _execute(job["program"])
    print(json.dumps({"token": job["token"], "outcome": outcome, "detail": detail[:500]}), file=report, flush=True)
    os._exit(0)  # threads that the program left behind are not waited for


def _isolate(job: dict[str, Any], report_handle: int) -> dict[str, Any]:
    """Applies every layer; returns `applied`, a list, and `missing`, the reason for each that could not be had."""
    folder = Path(job["folder"])
    applied: list[str] = []
    missing: dict[str, str] = {}

    def layer(name: str, action: Callable[[], object]) -> None:
        if name in job["without"]:
            missing[name] = "left out by request"
            return
        try:
            action()
            applied.append(name)
        except OSError as error:
            missing[name] = str(error)

    layer("namespaces", namespaces.enter_namespaces)
    if "namespaces" in applied:
        _become_first_process(report_handle)
        layer("scratch", lambda: namespaces.mount_scratch(folder, job["scratch_bytes"]))
    os.chdir(folder)
    _limit_resources(job, own_count="namespaces" in applied)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    layer("landlock", lambda: landlock.restrict_files(_readable(), [folder, Path("/dev/null")]))
    layer("capabilities", kernel.drop_capabilities)
    # Without Landlock a program could write anywhere, without a file system of its own it could fill the disk.
    layer("seccomp", lambda: seccomp.install_filter(forbid_writing=not {"landlock", "scratch"} <= set(applied)))
    return {"applied": applied, "missing": missing}


def _become_first_process(report_handle: int) -> None:
    """Goes on in a child, which is process 1 of the new namespace: when it ends, so do all that it started."""
    child = os.fork()
    if child:
        os.close(report_handle)
        _, status = os.waitpid(child, 0)
        os._exit(0 if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL, "death signal")


def _limit_resources(job: dict[str, Any], *, own_count: bool) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_FSIZE: job["scratch_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if own_count:  # outside a namespace of its own, all threads of the user count; root's are never limited
        limits[resource.RLIMIT_NPROC] = _THREADS
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _readable() -> list[Path]:
    return [Path(p) for p in {sys.prefix, sys.base_prefix, sys.exec_prefix, *_LIBRARIES, *_DEVICES}]


def _execute(program: str) -> tuple[str, str]:
    """Runs the program as a script; returns (outcome, detail)."""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except MemoryError:
        return "memory", "MemoryError"
    except SystemExit as error:
        return "failed", f"SystemExit: {error}"
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""
