"""Programs that try to do harm: each is run for real and must leave nothing behind."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.evaluation.sandbox import SandboxLimits, run_program

LAYERS = [frozenset(), frozenset({"namespaces"}), frozenset({"landlock"}), frozenset({"namespaces", "landlock"})]
QUICK = SandboxLimits(time_s=3.0, memory_mib=256, output_kib=64, scratch_mib=4)
every_layering = pytest.mark.parametrize("without", LAYERS, ids=lambda names: "without " + "+".join(sorted(names)))


def attempt(code):
    """A program that passes only if `code` is refused with an OSError."""
    return f"try:\n    {code}\nexcept OSError:\n    pass\nelse:\n    raise AssertionError('it was allowed')\n"


@every_layering
def test_ordinary_program_passes(without):
    result = run_program("import math, json, re\nassert math.comb(4, 2) == 6\n", QUICK, without=without)
    assert (result.outcome, result.detail) == ("passed", "")
    assert without <= set(result.missing)
    assert "seccomp" in result.applied


@pytest.mark.parametrize(
    ("program", "outcome", "detail"),
    [
        ("assert 1 + 1 == 3, 'no'", "failed", "AssertionError: no"),
        ("raise SystemExit(0)", "failed", "SystemExit: 0"),
        ("import os; os._exit(0)", "failed", "ended early (exit code 0)"),
        ("def f(:", "failed", "SyntaxError"),
        ("import os; os.closerange(0, 64)", "failed", "ended early"),
    ],
)
def test_only_the_last_line_counts_as_passing(program, outcome, detail):
    result = run_program(program, QUICK)
    assert result.outcome == outcome
    assert detail in result.detail


@every_layering
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.Popen(['/bin/true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
    ],
)
def test_no_new_processes(code, without):
    assert run_program(attempt(code), QUICK, without=without).outcome == "passed"


def test_fork_bomb_leaves_no_process():
    before = _programs()
    program = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    run_program(program, SandboxLimits(time_s=1.0))
    assert _programs() <= before


def _programs():
    """Process ids of launchers and of what they started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if b"confinement.launcher import main" in path.read_bytes():
                found.add(path.parent.name)
    return found


@every_layering
def test_memory_is_limited(without):
    result = run_program("data = []\nwhile True:\n    data.append(bytearray(10**7))\n", QUICK, without=without)
    assert result.outcome == "memory"


@every_layering
@pytest.mark.parametrize("sleep", ["while True: pass", "import time; time.sleep(60)"])
def test_endless_programs_end_in_time(sleep, without):
    begin = time.monotonic()
    result = run_program(sleep, SandboxLimits(time_s=1.0), without=without)
    assert result.outcome == "timeout"
    assert time.monotonic() - begin < 15


def test_catching_everything_does_not_help():
    program = "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass\n"
    assert run_program(program, SandboxLimits(time_s=1.0)).outcome == "timeout"


def test_printing_for_ever_is_cut_off():
    result = run_program("while True: print('x' * 1000)", QUICK)
    assert result.outcome == "output"
    assert "64 KiB" in result.detail


@every_layering
def test_files_outside_cannot_be_touched(tmp_path, without):
    victim = tmp_path / "precious.txt"
    victim.write_text("keep me")
    mode = victim.stat().st_mode
    for code in (
        f"import os; os.remove({str(victim)!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"open({str(victim)!r}, 'w')",
        f"open({str(victim)!r}, 'a')",
        f"import os; os.truncate({str(victim)!r}, 0)",
        f"import os; os.rename({str(victim)!r}, {str(tmp_path / 'other')!r})",
        f"import os; os.chmod({str(victim)!r}, 0)",
        f"import os; os.utime({str(victim)!r}, (0, 0))",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
        f"import os; os.symlink('x', {str(tmp_path / 'link')!r})",
        f"import os; os.link({str(victim)!r}, {str(tmp_path / 'hard')!r})",
        "open('/tmp/openrlhf-ebft-evil', 'w')",
    ):
        result = run_program(attempt(code), QUICK, without=without)
        assert (result.outcome, result.detail) == ("passed", ""), code
    assert victim.read_text() == "keep me"
    assert victim.stat().st_mode == mode
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    assert not Path("/tmp/openrlhf-ebft-evil").exists()


def test_own_folder_can_be_used_and_is_gone_afterwards():
    program = "import os, pathlib\npathlib.Path('a').write_text('x')\nprint(os.getcwd())\nos.remove('a')\n"
    before = set(Path("/tmp").glob("openrlhf-ebft-program-*"))
    assert run_program(program, QUICK).outcome == "passed"
    assert set(Path("/tmp").glob("openrlhf-ebft-program-*")) <= before


@every_layering
def test_disk_cannot_be_filled(without):
    program = "for i in range(100):\n    open(str(i), 'wb').write(bytes(10**6))\n"
    result = run_program(program, QUICK, without=without)
    assert result.outcome == "failed"
    # Without a file system of its own, or without Landlock, it may not write at all.
    assert ("not permitted" if without else "No space") in result.detail


@every_layering
def test_no_network(without):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert run_program(attempt(code), QUICK, without=without).outcome == "passed"
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        code = f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)"
        assert run_program(attempt(code), QUICK, without=without).outcome == "passed"


@every_layering
@pytest.mark.parametrize(
    "target", ["os.getppid()", str(os.getpid()), "-1", "0"], ids=["parent", "tests", "all", "group"]
)
def test_other_processes_cannot_be_signalled(target, without):
    code = f"import os, signal; os.kill({target}, signal.SIGKILL)"
    assert run_program(attempt(code), QUICK, without=without).outcome == "passed"


@every_layering
def test_handles_do_not_signal_other_processes(without):
    """The kernel signals the owner of a handle when there is something to read, whatever `kill` refuses."""
    for command in ("F_SETOWN", "F_SETSIG"):
        code = f"import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.{command}, 9)"
        assert run_program(attempt(code), QUICK, without=without).outcome == "passed"


@every_layering
def test_no_datagrams_to_sockets_of_the_machine(tmp_path, without):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        server.setblocking(False)
        for kind in ("SOCK_DGRAM", "SOCK_RAW"):
            code = f"import socket; socket.socketpair(socket.AF_UNIX, socket.{kind})[0].sendto(b'evil', {path!r})"
            assert run_program(attempt(code), QUICK, without=without).outcome == "passed"
        with pytest.raises(BlockingIOError):
            server.recv(10)
    assert run_program("import asyncio; asyncio.run(asyncio.sleep(0))", QUICK, without=without).outcome == "passed"


@every_layering
def test_attributes_of_readable_files_cannot_be_changed(without):
    code = f"import fcntl; fcntl.ioctl(open({subprocess.__file__!r}), 0x40086602, bytes(8))"  # what chattr asks for
    result = run_program(code, QUICK, without=without)
    assert "PermissionError" in result.detail


@every_layering
def test_nothing_is_left_behind(without):
    """Neither a group of its own nor another signal at its parent's death, nor closed handles, hide a program."""
    program = (
        "import contextlib, ctypes, os, time\n"
        "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "for leave in (os.setsid, os.setpgrp):\n"
        "    with contextlib.suppress(OSError):\n        leave()\n"
        "os.closerange(0, 64)\n"
        "time.sleep(1000)\n"
    )
    before = _programs()
    assert run_program(program, SandboxLimits(time_s=1.0), without=without).outcome == "timeout"
    deadline = time.monotonic() + 5
    while _programs() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _programs() <= before


@every_layering
def test_other_processes_keep_their_limits_and_priority(without):
    before = resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0)
    for code in (
        f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_NOFILE, (3, 3))",
        f"import os; os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19)",
        f"import os; os.sched_setaffinity({os.getpid()}, [0])",
    ):
        assert run_program(attempt(code), QUICK, without=without).outcome == "passed"
    assert (resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0)) == before


@every_layering
def test_environment_is_empty(monkeypatch, without):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-parent")
    program = "import os\nassert 'secret-of-the-parent' not in str(dict(os.environ))\n"
    assert run_program(program, QUICK, without=without).outcome == "passed"


@pytest.mark.parametrize("without", [frozenset(), frozenset({"namespaces"})], ids=["all", "without namespaces"])
def test_parents_environment_and_other_files_cannot_be_read(tmp_path, monkeypatch, without):
    secret = tmp_path / "token"
    secret.write_text("secret")
    for path in (secret, Path("/etc/passwd"), Path(f"/proc/{os.getpid()}/environ"), Path("/proc/self/environ")):
        result = run_program(attempt(f"open({str(path)!r}).read()"), QUICK, without=without)
        assert (result.outcome, result.detail) == ("passed", ""), path
    result = run_program(attempt(f"import os; os.listdir({str(tmp_path)!r})"), QUICK, without=without)
    assert result.outcome == "passed"


def test_open_handles_of_the_parent_are_not_inherited(tmp_path):
    with (tmp_path / "log").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        program = (
            "import os\nfor handle in range(3, 64):\n    try:\n"
            "        os.write(handle, b'evil')\n    except OSError:\n        pass\n"
        )
        run_program(program, QUICK)
    assert (tmp_path / "log").read_text() == ""


def test_forged_report_is_not_believed():
    program = (
        "import os\n"
        "for handle in range(3, 64):\n    try:\n"
        '        os.write(handle, b\'{"token": "x", "outcome": "passed", "detail": ""}\\n\')\n'
        "    except OSError:\n        pass\n"
        "os._exit(0)\n"
    )
    assert run_program(program, QUICK).outcome == "failed"


@pytest.mark.parametrize(
    "record", ["'[' * 60000", """json.dumps({'token': frame.f_locals['job']['token'], 'outcome': ['passed']})"""]
)
def test_reports_that_make_no_sense_are_failures(record):
    program = (
        "import json, os, sys\n"
        "frame = sys._getframe()\n"
        "while 'job' not in frame.f_locals:\n    frame = frame.f_back\n"
        "for handle in range(3, 64):\n    try:\n"
        f"        os.write(handle, ({record} + '\\n').encode())\n"
        "    except OSError:\n        pass\n"
        "os._exit(0)\n"
    )
    assert run_program(program, QUICK).outcome == "failed"


def test_machine_that_cannot_confine_is_refused():
    with pytest.raises(UserError, match="cannot confine generated code .*execute_code"):
        run_program("pass", QUICK, without=frozenset({"seccomp"}))


def test_program_dies_with_its_parent():
    script = (
        "from openrlhf_ebft.evaluation.sandbox import SandboxLimits, run_program\n"
        "run_program('import time; time.sleep(100)', SandboxLimits(time_s=100))\n"
    )
    before = _programs()
    parent = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 20
    while not _programs() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _programs() - before
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while _programs() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _programs() - before
