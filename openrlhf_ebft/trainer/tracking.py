"""Writes metrics where people and programs look for them: metrics.jsonl, tensorboard, Weights & Biases."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig


def check_trackers(config: EBFTConfig) -> None:
    """Raises UserError when a package that the configuration's trackers need is not installed."""
    project = config.logging.wandb_project
    if project is not None and find_spec("wandb") is None:
        raise UserError(
            f"logging.wandb_project = {project} needs the package wandb: pip install wandb, or leave the key out"
        )


@dataclass(frozen=True)
class SkippedStep:
    """Why a step changed no weight, and the examples behind it."""

    reason: str
    examples: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.examples[:8]) + (", ..." if len(self.examples) > 8 else "")
        return f"{self.reason}, examples {shown}"


class Tracker:
    """One record a step, to every place that the configuration names."""

    def __init__(self, folder: Path, config: EBFTConfig) -> None:
        """`folder` is the run directory; records are added to those that it has."""
        self._folder = folder
        self._path = folder / "metrics.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard = _tensorboard(folder, None) if config.logging.tensorboard else None
        self._wandb = _wandb(folder, config) if config.logging.wandb_project else None

    def rewind(self, step: int, *, final_too: bool = False) -> None:
        """Drops the records of steps after `step`, which come again; with `final_too` also an evaluation at `step`.

        Weights & Biases takes records but does not give them back: there the steps show twice.
        """
        self._file.close()
        _drop_later(self._path, step, final_too)
        self._file = self._path.open("a", encoding="utf-8")
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = _tensorboard(self._folder, step + 1)

    def log(self, step: int, phase: str, metrics: dict[str, float | None], skipped: SkippedStep | None = None) -> None:
        """Records one step.

        Args:
            step: number of the record within the run, from 1; evaluations carry the step they follow.
            phase: `sft`, `ebft` or `evaluation`.
            metrics: values by name. A value that is not finite is written as null: NaN is no JSON.
            skipped: why a step changed no weight.
        """
        finite = {name: _finite(value) for name, value in metrics.items()}
        why = {} if skipped is None else {"skipped_because": skipped.reason, "skipped_examples": list(skipped.examples)}
        self._file.write(json.dumps({"step": step, "phase": phase, **finite, **why}, allow_nan=False) + "\n")
        self._file.flush()
        present = {f"{phase}/{name}": value for name, value in finite.items() if value is not None}
        if self._tensorboard is not None:
            for name, value in present.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **present})

    def close(self) -> None:
        """Flushes and closes everything."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _drop_later(path: Path, step: int, final_too: bool) -> None:
    """Keeps the records up to `step`; a last line that was cut off in writing goes, too."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        record = json.loads(line)
        if record["step"] > step or (final_too and record["step"] == step and record["phase"] == "evaluation"):
            break
        kept.append(line)
    aside = path.with_suffix(".jsonl.partial")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)


def _tensorboard(folder: Path, purge_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)


def _wandb(folder: Path, config: EBFTConfig) -> Any:
    import wandb

    return wandb.init(
        project=config.logging.wandb_project,
        name=config.name,
        dir=str(folder),
        mode=config.logging.wandb_mode,
        config=config.model_dump(mode="json"),
    )
