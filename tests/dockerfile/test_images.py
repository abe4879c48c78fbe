"""The Dockerfiles: hadolint finds nothing, versions are pinned and agree, users are not root, and the build context
holds what they copy. The entrypoint and the health check run for real, without a container."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from openrlhf_ebft import __version__
from tests.processes import ROOT, free_port
from tests.trainer.victims import offspring

FOLDER = ROOT / "dockerfile"
BIN = Path(sys.executable).parent
FILES = ["Dockerfile.cpu", "Dockerfile.gpu"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, argument) pairs; continued lines are joined, comments dropped."""
    lines = [line for line in (FOLDER / name).read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def arguments(name: str, instruction: str) -> list[str]:
    return [argument for word, argument in instructions(name) if word == instruction]


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name):
    done = subprocess.run([BIN / "hadolint", FOLDER / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_would_find_something(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    done = subprocess.run([BIN / "hadolint", tmp_path / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 1 and "DL3006" in done.stdout


@pytest.mark.parametrize("name", FILES)
def test_pinned_and_without_root(name):
    (base,) = arguments(name, "FROM")
    assert re.fullmatch(r"[\w/.-]+:\d+\.\d+\.\d+-[\w.-]+", base), base
    assert arguments(name, "USER") == ["1000:0"]
    assert "HEALTHCHECK" in dict(instructions(name))
    assert arguments(name, "ENTRYPOINT") == ['["tini", "--", "entrypoint.sh"]']
    assert f"openrlhf-ebft:{__version__}-{name.rpartition('.')[2]}" in (FOLDER / name).read_text()
    order = [word for word, _ in instructions(name)]
    last_root = max(i for i, (word, text) in enumerate(instructions(name)) if word == "RUN" and "apt-get" in text)
    assert last_root < order.index("USER")


@pytest.mark.parametrize("name", FILES)
def test_the_user_owns_the_folders_that_it_works_in(name):
    """A builder may make a WORKDIR as root, and then the package's build could not write beside its sources."""
    (setup,) = [text for text in arguments(name, "RUN") if "useradd" in text]
    made = re.search(r"mkdir -p ([^&]+)&& chown -R ray:0 ([^&]+)&&", re.sub(r"\s+", " ", setup))
    assert made is not None, setup
    for folder in arguments(name, "WORKDIR"):
        assert folder in made[1].split()
        assert any(Path(folder).is_relative_to(owned) for owned in made[2].split())


def test_the_toolkit_is_that_of_torch():
    """torch 2.13 asks for the libraries of CUDA 13.0."""
    (base,) = arguments("Dockerfile.gpu", "FROM")
    assert base.startswith("nvidia/cuda:13.0.")
    assert 'TORCH = "2.13.0"' in (ROOT / "scripts" / "install.py").read_text()


@pytest.mark.parametrize("name", FILES)
def test_the_build_context_holds_what_is_copied(name):
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    assert "*" in ignore
    for argument in arguments(name, "COPY"):
        words = [word for word in argument.split() if not word.startswith("--")]
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert any(Path(source).is_relative_to(folder) for folder in kept), source


def test_files_beside_the_code_are_installed_with_it():
    """An image copies the package, it does not link to a clone: what is not Python must be named in setup.py."""
    others = {path.name for path in (ROOT / "openrlhf_ebft").rglob("*") if path.is_file() and ".py" not in path.suffix}
    text = (ROOT / "setup.py").read_text()
    assert others and all(f'"{name}"' in text for name in others)


@pytest.mark.parametrize("name", ["entrypoint.sh", "healthcheck.sh"])
def test_shellcheck_finds_nothing(name):
    done = subprocess.run([BIN / "shellcheck", FOLDER / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(FOLDER / name, os.X_OK)


@pytest.fixture
def container():
    """Folder and environment that stand for a container's: own /tmp, own ports, own token."""
    with tempfile.TemporaryDirectory(prefix="ct", dir="/tmp") as folder:
        ports = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
        flags = [f"--{name}={free_port()}" for name in (*ports, "ray-client-server-port")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        yield clean | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
            "RAY_PORT": str(free_port()),
            "RAY_DASHBOARD_PORT": str(free_port()),
            "RAY_DASHBOARD_HOST": "127.0.0.1",
            "RAY_START_FLAGS": f"--temp-dir={folder}/ray --num-cpus=1 --object-store-memory=100000000 "
            + " ".join(flags),
        }


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [FOLDER / "entrypoint.sh", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def is_healthy(environment: dict[str, str]) -> bool:
    done = subprocess.run([FOLDER / "healthcheck.sh"], env=environment, capture_output=True, timeout=60)
    return done.returncode == 0


@pytest.mark.stack
def test_head_with_a_command_ends_with_its_exit_code(container):
    """The command finds the cluster, the head is healthy meanwhile, and nothing is left afterwards."""
    script = 'openrlhf-ebft doctor --address "$RAY_ADDRESS" && "$0" && exit 7'
    process = start(container, "head", "bash", "-c", script, str(FOLDER / "healthcheck.sh"))
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        stop(process)
    assert process.returncode == 7, output
    assert "node 0: 1 CPU, 0 GPU free" in output
    assert not is_healthy(container)


@pytest.mark.stack
def test_a_signal_reaches_the_command_first(container):
    script = 'trap "echo saved; exit 5" TERM; echo ready; while true; do sleep 0.1; done'
    process = start(container, "head", "bash", "-c", script)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "ready\n":
                break
        family = offspring(process.pid)
        process.send_signal(signal.SIGTERM)
        output = "".join(lines) + process.communicate(timeout=60)[0]
    finally:
        stop(process)
    assert process.returncode == 5, output
    assert "saved" in output
    end = time.monotonic() + 20
    while (left := [line for pid, line in family.items() if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left


def test_other_commands_run_alone_and_are_healthy(container):
    process = start(container, "openrlhf-ebft", "--version")
    assert process.communicate(timeout=60)[0] == f"openrlhf-ebft {__version__}\n"
    assert is_healthy(container)


@pytest.mark.parametrize(("words", "message"), [([], "needs head"), (["worker"], "needs the head's HOST:PORT")])
def test_wrong_use_is_explained(container, words, message):
    process = start(container, *words)
    assert message in process.communicate(timeout=30)[0]
    assert process.returncode == 2


def stop(process: subprocess.Popen[str]) -> None:
    """Whatever a failed test leaves: the processes that it started, by their ids."""
    for pid in [process.pid, *offspring(process.pid)]:
        if process.poll() is None or pid != process.pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
