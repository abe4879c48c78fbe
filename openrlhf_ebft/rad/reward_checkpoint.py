"""Checkpoints of reward training: complete or absent, the newest one kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

_WEIGHTS = "model.safetensors"
_STATE = "trainer.pt"
_RANKS = "ranks.json"  # only in checkpoints of several ranks


class CheckpointMismatch(ValueError):
    """A checkpoint that another run wrote: other settings, other data, other ranks."""


class RewardCheckpoints:
    """Writes and finds `folder/step-N`, whatever lies in them.

    Args:
        folder: where the checkpoints lie.
        every: optimizer steps between two checkpoints; 0 saves none.
        resume: go on from the newest one, if there is one.

    Raises:
        ValueError: a negative `every`.
    """

    def __init__(self, folder: str | Path, every: int, resume: bool) -> None:
        if every < 0:
            raise ValueError(f"every must be at least 0 optimizer steps, got {every}")
        self.folder = Path(folder)
        self.every = every
        self.resume = resume

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to save after `step`; the last step is not, since the result itself is saved then."""
        return self.every > 0 and step % self.every == 0 and step < total_steps

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Let `fill` write into a folder of a temporary name, rename it, then remove the older checkpoints."""
        partial = self.folder / f"partial-{step}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        final = self.folder / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in self._complete():
            if old != final:
                shutil.rmtree(old)
        return final

    def newest(self) -> Path | None:
        """The checkpoint to go on from; None when there is none, or when resuming is not asked for."""
        found = self._complete() if self.resume else []
        return found[-1] if found else None

    def _complete(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        found = [path for path in self.folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def write_process_state(folder: Path, model: PreTrainedModel, state: dict[str, Any]) -> None:
    """What one process needs to go on: weights and trainer state."""
    # Cloned, since tied weights share memory, which the format does not take.
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / _WEIGHTS)
    torch.save(state, folder / _STATE)


def read_process_state(folder: Path, model: PreTrainedModel) -> dict[str, Any]:
    """Load the weights into `model`; returns the trainer state.

    Raises:
        CheckpointMismatch: several ranks wrote the checkpoint.
    """
    written = _layout_of(folder)
    if written is not None:
        raise CheckpointMismatch(
            f"{folder} was written by {written.ranks} ranks; set training.ranks to that, or start anew"
        )
    model.load_state_dict(load_file(folder / _WEIGHTS))
    return torch.load(folder / _STATE, map_location="cpu", weights_only=True)


@dataclass(frozen=True)
class RankLayout:
    """How many ranks hold the state of a distributed run, and how DeepSpeed shards it."""

    ranks: int
    zero_stage: int


def _layout_of(folder: Path) -> RankLayout | None:
    """None for a checkpoint of one process."""
    path = folder / _RANKS
    return RankLayout(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def write_rank_state(folder: Path, rank: int, layout: RankLayout, state: dict[str, Any]) -> None:
    """One rank's own state; rank 0 adds the layout."""
    torch.save(state, folder / f"rank-{rank}.pt")
    if rank == 0:
        (folder / _RANKS).write_text(json.dumps(asdict(layout)), encoding="utf-8")


def read_rank_state(folder: Path, rank: int, layout: RankLayout) -> dict[str, Any]:
    """One rank's own state.

    Raises:
        CheckpointMismatch: one process, or ranks of another layout, wrote the checkpoint.
    """
    written = _layout_of(folder)
    if written is None:
        raise CheckpointMismatch(f"{folder} was written by one process; set training.ranks to 1, or start anew")
    if written != layout:
        raise CheckpointMismatch(
            f"{folder} was written with training.ranks = {written.ranks} and training.zero_stage = "
            f"{written.zero_stage}, not {layout.ranks} and {layout.zero_stage}; restore them, or start anew"
        )
    return torch.load(folder / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
