"""Trains a tiny model for hundreds of steps and shows what grows: python -m scripts.soak [--steps 300].

Private memory and open files of every process, the object store and the disk are measured about once a second. The
table gives each one's straight-line slope after step 50, and in the last third alone: what fills up to a bound is flat
there. Records of steps (metrics, tensorboard) grow by design and are listed apart.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ray
from ray._private import worker
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from openrlhf_ebft.config import load_config
from openrlhf_ebft.trainer.console import aligned
from openrlhf_ebft.trainer.run import run_training
from tests.trainer import runs
from tests.trainer.victims import offspring

SETTLED_AFTER = 50  # steps
Samples = dict[tuple[str, str], list[tuple[int, float]]]  # (thing, unit) -> (step, value)


class Sampler(threading.Thread):
    """Measures the run of this process until its last step, or until it is told to stop."""

    def __init__(self, run: Path, last: int) -> None:
        super().__init__(name="sampler", daemon=True)
        self.samples: Samples = defaultdict(list)
        self._run = run
        self._last = last
        self._ended = threading.Event()

    def run(self) -> None:
        step = 0
        while step < self._last and not self._ended.wait(1.0):  # asking a Ray that is ending would end this process,
            step = self._step()
            if step and ray.is_initialized():  # and one that has ended would start another
                for key, value in self._measure():
                    self.samples[key].append((step, value))

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _step(self) -> int:
        metrics = self._run / "metrics.jsonl"
        if not metrics.exists():
            return 0
        with metrics.open("rb") as file:  # the end alone: the driver, whose memory is measured, must not read it whole
            file.seek(max(metrics.stat().st_size - 100_000, 0))
            steps = re.findall(rb'^\{"step": (\d+)', file.read(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def _measure(self) -> Iterator[tuple[tuple[str, str], float]]:
        processes = {os.getpid(): "driver"}
        for pid, arguments in offspring(os.getpid()).items():
            kind = re.match(r"ray::(\w+)", arguments)
            name = kind[1] if kind and kind[1].endswith("Actor") else Path(arguments.split()[0]).name
            if name in ("raylet", "gcs_server") or name.endswith("Actor"):
                processes[pid] = name
        for pid, name in processes.items():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                yield (f"{name} private memory", "MiB"), int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) / 1024
                yield (f"{name} open files", "files"), len(os.listdir(f"/proc/{pid}/fd"))
            except (FileNotFoundError, ProcessLookupError, IndexError):  # the process ended meanwhile
                continue
        state = get_state_from_address(ray.get_runtime_context().gcs_address)
        used = get_memory_info_reply(state).store_stats.object_store_bytes_used
        yield ("object store", "MiB"), used / 2**20
        records = _size(self._run / "metrics.jsonl") + _size(self._run / "tensorboard")
        yield ("run directory without records", "MiB"), (_size(self._run) - records) / 2**20
        yield ("records (metrics, tensorboard)", "MiB"), records / 2**20
        yield ("Ray's session folder", "MiB"), _size(Path(worker._global_node.get_session_dir_path())) / 2**20


def _size(path: Path) -> int:
    done = subprocess.run(["du", "-sb", str(path)], capture_output=True, text=True)
    return int(done.stdout.split()[0]) if done.stdout else 0


def table(samples: Samples) -> str:
    """Slopes by least squares over the samples after step 50, and over those of the last third of them."""
    rows = [("measured", "at step 50", "at the end", "slope per 100 steps", "in the last third", "samples")]
    for (name, unit), values in samples.items():
        settled = [value for value in values if value[0] >= SETTLED_AFTER]
        if len({step for step, _ in settled}) < 2:
            continue
        steps, amounts = np.array(settled, dtype=float).T
        late = steps >= (steps[0] + 2 * steps[-1]) / 3
        slopes = [100 * np.polyfit(steps[part], amounts[part], 1)[0] for part in (steps > 0, late)]
        ends = f"{amounts[0]:.1f} {unit}", f"{amounts[-1]:.1f}"
        rows.append((name, *ends, *(f"{slope:+.3f} {unit}" for slope in slopes), str(len(steps))))
    return aligned(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description="What grows over hundreds of steps.")
    parser.add_argument("--steps", type=int, default=300, help="EBFT steps")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm", help="rollout engine")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    runs.write_inputs(folder, rows=60)
    settings = {
        "rollout": {"engine": options.engine},
        "policy": {"max_steps": options.steps, "sft_warmup_steps": 0},
        "evaluation": {"every_steps": 50, "max_examples": 4},
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        "optimizer": {"learning_rate": 1e-6},
    }
    config = load_config(runs.write_config(folder, "soak", **settings))
    sampler = Sampler(folder / "runs" / "soak", options.steps)
    sampler.start()
    code = run_training(config)
    sampler.stop()
    print(table(sampler.samples))
    shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    os.environ.update({"HF_HUB_OFFLINE": "1", "PATH": runs.environment()["PATH"]})
    sys.exit(main())
