"""Checkpoints of reward training: complete or absent, the newest one kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

_WEIGHTS = "model.safetensors"
_STATE = "trainer.pt"


class RewardCheckpoints:
    """Saves and finds `folder/step-N`.

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

    def save(self, model: PreTrainedModel, state: dict[str, Any], step: int) -> Path:
        """Write weights and trainer state under a temporary name, rename, then remove the older checkpoints."""
        partial = self.folder / f"partial-{step}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # Cloned, since tied weights share memory, which the format does not take.
        weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, partial / _WEIGHTS)
        torch.save(state, partial / _STATE)
        final = self.folder / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in self._complete():
            if old != final:
                shutil.rmtree(old)
        return final

    def load_latest(self, model: PreTrainedModel) -> dict[str, Any] | None:
        """Load the newest checkpoint's weights into `model`; returns its trainer state, None when there is none."""
        found = self._complete() if self.resume else []
        if not found:
            return None
        newest = found[-1]
        model.load_state_dict(load_file(newest / _WEIGHTS))
        return torch.load(newest / _STATE, map_location="cpu", weights_only=True)

    def _complete(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        found = [path for path in self.folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
