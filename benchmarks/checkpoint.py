"""How long training waits for a checkpoint, written at once and in the background (checkpoint.background).

One trainer rank makes supervised steps and saves after some of them. `waits` is what a checkpoint adds to the step
after which it is due, hashing and flushing included; `complete` is the time until it is in its place; `step` and
`step meanwhile` are a step alone and one beside a background write. Wall time: medians.

    python benchmarks/checkpoint.py --model models/SmolLM2-135M-Instruct --folder /tmp
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from strided import document

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import count_step, without_advantages
from openrlhf_ebft.distributed.policy_trainer import PolicyTrainer
from openrlhf_ebft.trainer.checkpoints import CheckpointStore
from openrlhf_ebft.trainer.console import aligned
from openrlhf_ebft.trainer.state import TrainerState

TOKENS = 128  # of the one reference in a step


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bench:
    """A trainer and where its checkpoints go."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        config = EBFTConfig(
            name="bench",
            model={"path": arguments.model, "dtype": arguments.dtype},
            data={"path": "unused"},
            checkpoint={"keep_last": 1},
        )
        self._trainer = PolicyTrainer(config, total_steps=1000)
        self._store = CheckpointStore(folder, config, lambda text: None)
        self._items = [without_advantages(RolloutTree.without_branches(document(arguments.model, TOKENS)))]
        self._folder = folder
        self._steps = 0

    def step(self) -> float:
        """Seconds of one step."""
        self._steps += 1
        counts = count_step([item.tree for item in self._items])
        return seconds(lambda: self._trainer.train_step([self._items], counts, "sft", self._items[0]))

    def save(self, background: bool) -> tuple[float, float, list[float]]:
        """Seconds that a checkpoint takes from training and until it is complete, and steps made meanwhile."""
        start = time.perf_counter()
        self._store.save(
            TrainerState(step=self._steps),
            lambda folder: self._trainer.save_checkpoint(folder, background=background),
            bytes_needed=lambda: 0,
            evaluation={},
            is_written=self._trainer.checkpoint_is_written if background else None,
        )
        waits, meanwhile = time.perf_counter() - start, []
        target = self._folder / f"step-{self._steps}"
        while not target.exists():
            meanwhile.append(self.step())
            self._store.look()
        return waits, time.perf_counter() - start, meanwhile

    def size_mib(self) -> float:
        """Of the newest checkpoint."""
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="How long training waits for a checkpoint.")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision")
    parser.add_argument("--folder", type=Path, required=True, help="where a folder for the checkpoints is made")
    parser.add_argument("--repeats", type=int, default=5, help="checkpoints of each kind")
    arguments = parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(arguments, Path(folder))
        alone = statistics.median([bench.step() for _ in range(6)][1:])
        rows = [("checkpoint", "waits", "complete", "step", "step meanwhile")]
        for background in (False, True):
            results = [bench.save(background) for _ in range(arguments.repeats) if bench.step()]
            waits, complete = (statistics.median(result[i] for result in results) for i in (0, 1))
            steps = [step for result in results for step in result[2]]
            beside = f"{statistics.median(steps):.2f} s" if steps else "-"
            name = "in the background" if background else "at once"
            rows.append((name, f"{waits:.2f} s", f"{complete:.2f} s", f"{alone:.2f} s", beside))
        print(f"{arguments.model}, {arguments.dtype}: {bench.size_mib():.0f} MiB")
        print(aligned(rows))


if __name__ == "__main__":
    main()
