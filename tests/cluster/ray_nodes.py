"""Real Ray nodes of a test: own ports, own folder, own token, and an end that reaches every process."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import ROOT, free_port
from tests.trainer.victims import offspring

BIN = Path(sys.executable).parent
START_S = 90.0


@dataclass
class Node:
    """One `ray start --block` in a session of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """SIGTERM makes it end its own processes; what is left after ten seconds is killed, session by session."""
        family = set(offspring(self.process.pid))
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._kill(family)

    def kill(self) -> None:
        """The machine is lost: every process of the node ends at once."""
        self._kill({self.process.pid, *offspring(self.process.pid)})

    def _kill(self, pids: set[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


@dataclass
class Cluster:
    """A head node, further nodes, and the environment in which commands reach them."""

    folder: Path
    port: int = field(default_factory=free_port)
    dashboard: int = field(default_factory=free_port)
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    @property
    def environment(self) -> dict[str, str]:
        """Commands find this environment's programs first, and the cluster's token."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return clean | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # what else runs on this machine must not end a test's jobs
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # For the RAD server, as its manifest has them.
            "RAD_API_KEYS": "a-key-for-tests",
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "openrlhf_ebft.serving.front.middlewares",
        }

    def start_head(self, cpus: int) -> None:
        (self.folder / "token").write_text(secrets.token_hex(32))
        settings = ["--head", f"--port={self.port}", f"--dashboard-port={self.dashboard}"]
        settings += [f"--ray-client-server-port={free_port()}", f"--temp-dir={self.folder / 'ray'}"]
        head = self._start(cpus, settings)
        self._wait(head, lambda: is_open(self.dashboard))

    def add_node(self, cpus: int) -> Node:
        """A second machine, as far as Ray can tell; returns when it is up.

        Of two nodes that start on one machine at the same time, Ray lets one fail: they choose the same names.
        """
        node = self._start(cpus, [f"--address={self.address}"])
        self._wait(node, lambda: b"Ray runtime started" in node.log.read_bytes())
        return node

    def _start(self, cpus: int, settings: list[str]) -> Node:
        ports = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
        settings = [*settings, *(f"--{name}={free_port()}" for name in ports)]
        log = self.folder / f"node{len(self.nodes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [BIN / "ray", "start", "--block", f"--num-cpus={cpus}", "--object-store-memory=200000000", *settings],
                env=self.environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(Node(process, log))
        return self.nodes[-1]

    def _wait(self, node: Node, is_up: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and node.process.poll() is None:
            if is_up():
                return
            time.sleep(0.2)
        raise AssertionError(f"node {self.nodes.index(node)} did not come up:\n{node.log.read_text()[-4000:]}")

    def run(self, *command: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Runs a program of this environment to its end."""
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def submit(self, *arguments: str) -> subprocess.Popen[str]:
        """`ray job submit` that follows the job's log."""
        return subprocess.Popen(
            [str(BIN / "ray"), "job", "submit", "--address", self.url, *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def new_cluster() -> Cluster:
    """A short folder: Ray puts sockets below it, whose paths may have 107 characters."""
    return Cluster(Path(tempfile.mkdtemp(prefix="rc", dir="/tmp")))
