"""The checkpoints of a run: complete or absent, the newest and the best are kept, and a full disk loses none."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ebft.actors.waiting import ActorError, StateLost
from openrlhf_ebft.config.durability import CheckpointConfig
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.manifests import DamagedCheckpoint, Manifest, check_files, read_manifest, write_manifest
from openrlhf_ebft.trainer.run_directory import PARTIAL, written_aside
from openrlhf_ebft.trainer.state import TrainerState

TRAINER = "trainer"
_MARGIN = 1.05  # a checkpoint may be a little larger than the one before


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the ones before are intact."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def state(self) -> TrainerState:
        """The controller's state."""
        return self.manifest.state

    @property
    def trainer(self) -> Path:
        """The folder that the trainer's ranks wrote."""
        return self.path / TRAINER


class CheckpointStore:
    """Writes, finds and thins out the checkpoints of one run."""

    def __init__(self, folder: Path, config: EBFTConfig, say: Callable[[str], None], data: str = "") -> None:
        """
        Args:
            folder: the run's checkpoint folder, reachable from all ranks.
            config: the run's configuration, for the manifests.
            say: takes a line about what was saved, passed over or left out.
            data: `data_fingerprint` of the training rows, for the manifests; not needed to read.
        """
        self._data = data
        self.folder = folder
        self._config = config
        self._settings: CheckpointConfig = config.checkpoint
        self._say = say

    def save(
        self,
        state: TrainerState,
        save_trainer: Callable[[Path], None],
        *,
        bytes_needed: Callable[[], int],
        evaluation: dict[str, float | None],
    ) -> Checkpoint | None:
        """Writes `step-N` and removes what need not be kept; None when it was left out because the disk is full.

        Args:
            state: the controller's state after step N.
            save_trainer: makes the trainer's ranks write into a folder.
            bytes_needed: size of a first checkpoint; later ones are as large as the newest.
            evaluation: held-out values of these weights, empty without any.

        Raises:
            CheckpointError: there is not enough room, or the write failed, and checkpoint.on_full_disk is `error`;
                also when one of several ranks failed, since the others then wait for it.
            StateLost: a rank was lost while writing.
        """
        target = self.folder / f"step-{state.step}"
        problem = self._lack_of_room(bytes_needed)
        if problem is None:
            problem = self._write(target, Manifest.of(state, self._config, evaluation, self._data), save_trainer)
        if problem is not None:
            return self._left_out(target, problem)
        checkpoint = Checkpoint(target, read_manifest(target))
        self._thin_out(target)
        self._say(f"checkpoint: {target}")
        return checkpoint

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint, None without any; damaged and half-written ones are named and passed over."""
        for partial in sorted(self.folder.glob(f"*{PARTIAL}")):
            self._say(f"passing over {partial}: its save did not finish")
        for path in self._numbered():
            try:
                check_files(path)
                return Checkpoint(path, read_manifest(path))
            except DamagedCheckpoint as error:
                self._say(f"passing over {path}: {error}")
        return None

    def required(self) -> Checkpoint:
        """As `newest`. Raises UserError when there is none."""
        checkpoint = self.newest()
        if checkpoint is None:
            raise UserError(
                f"{self.folder} holds no complete checkpoint (checkpoint.every_steps sets how often one is saved)"
            )
        return checkpoint

    def is_among_best(self, evaluation: dict[str, float | None]) -> bool:
        """Whether a checkpoint with these held-out values would be one of the checkpoint.keep_best best."""
        value = self._badness(evaluation)
        if not self._settings.keep_best or value == math.inf:
            return False
        better = [path for path in self._numbered() if self._badness(self._evaluation_of(path)) <= value]
        return len(better) < self._settings.keep_best

    def _write(self, target: Path, manifest: Manifest, save_trainer: Callable[[Path], None]) -> str | None:
        """Writes a checkpoint; returns what went wrong, after removing what was written of it."""
        try:
            with written_aside(target) as aside:
                (aside / TRAINER).mkdir()
                save_trainer(aside / TRAINER)
                write_manifest(aside, manifest)
        except StateLost:
            raise
        except ActorError as error:
            problem = str(error)
            if self._config.policy.num_ranks > 1:
                raise CheckpointError(f"{target} could not be written: {problem}{self._room()}") from error
        except OSError as error:
            problem = f"{error}"
        else:
            return None
        shutil.rmtree(target.with_name(target.name + PARTIAL), ignore_errors=True)
        return problem + self._room()

    def _lack_of_room(self, bytes_needed: Callable[[], int]) -> str | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        numbered = self._numbered()
        size = _folder_bytes(numbered[0]) * _MARGIN if numbered else bytes_needed()
        free = shutil.disk_usage(self.folder).free
        if free >= size:
            return None
        return f"it needs about {size / 2**20:.1f} MiB, and {self.folder} has {free / 2**20:.1f} MiB free"

    def _room(self) -> str:
        return f" ({shutil.disk_usage(self.folder).free / 2**20:.1f} MiB free)"

    def _left_out(self, target: Path, problem: str) -> None:
        kept = self._numbered()
        text = f"{target} could not be written: {problem}; " + (
            f"the newest checkpoint is still {kept[0]}" if kept else "there is no checkpoint before it"
        )
        if self._settings.on_full_disk == "error":
            raise CheckpointError(f"{text} (checkpoint.on_full_disk = warn would go on without)")
        self._say(f"warning: {text}")

    def _thin_out(self, just_written: Path) -> None:
        """Removes all but the newest and the best. The one just written stays, whatever number others have."""
        numbered = self._numbered()
        keep = {just_written, *[path for path in numbered if path != just_written][: self._settings.keep_last - 1]}
        ranked = sorted(numbered, key=lambda path: self._badness(self._evaluation_of(path)))
        keep |= {
            path for path in ranked[: self._settings.keep_best] if self._badness(self._evaluation_of(path)) < math.inf
        }
        for path in numbered:
            if path not in keep:
                shutil.rmtree(path)

    def _badness(self, evaluation: dict[str, float | None]) -> float:
        """The chosen value, turned so that lower is better; infinite where it is missing or not a number."""
        value = evaluation.get(self._settings.best_metric)
        if value is None or not math.isfinite(value):
            return math.inf
        return value if self._settings.best_direction == "lower" else -value

    def _evaluation_of(self, path: Path) -> dict[str, float | None]:
        try:
            return read_manifest(path).evaluation
        except DamagedCheckpoint:  # it is named when a checkpoint is looked for
            return {}

    def _numbered(self) -> list[Path]:
        """Checkpoint folders, newest first."""
        found = [path for path in self.folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
        return sorted(found, key=lambda path: -int(path.name.removeprefix("step-")))


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
