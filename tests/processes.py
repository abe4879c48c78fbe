"""Starts the ranks of a distributed test as plain processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_ranks(module: str, world_size: int, *arguments: str, timeout_s: float = 150) -> None:
    """Runs `python -m module arguments...` once for each rank and waits; a failing rank's output is in the error."""
    port = free_port()
    ranks = []
    for rank in range(world_size):
        settings = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, **settings},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    failed = [(rank, out) for rank, (p, out) in enumerate(zip(ranks, outputs, strict=True)) if p.returncode]
    if failed:
        raise AssertionError("\n".join(f"rank {rank} failed:\n{out[-4000:]}" for rank, out in failed))
