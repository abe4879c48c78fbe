"""The checkpoints of a run: complete or absent, the newest and the best are kept, and a full disk loses none."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ebft.actors.waiting import ActorError, StateLost
from openrlhf_ebft.config.durability import CheckpointConfig
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.manifests import DamagedCheckpoint, Manifest, check_files, read_manifest
from openrlhf_ebft.trainer.pending_checkpoint import TRAINER, PendingCheckpoint
from openrlhf_ebft.trainer.run_directory import PARTIAL
from openrlhf_ebft.trainer.state import TrainerState

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
        self._pending: PendingCheckpoint | None = None

    def save(
        self,
        state: TrainerState,
        save_trainer: Callable[[Path], None],
        *,
        bytes_needed: Callable[[], int],
        evaluation: dict[str, float | None],
        is_written: Callable[[], bool] | None = None,
    ) -> None:
        """Writes `step-N` and removes what need not be kept.

        With `is_written` this returns when the ranks have taken a copy of what they hold, and `look` or `finish` end
        the checkpoint.

        Args:
            state: the controller's state after step N.
            save_trainer: makes the trainer's ranks write into a folder, or take a copy that they write by and by.
            bytes_needed: size of a first checkpoint; later ones are as large as the newest.
            evaluation: held-out values of these weights, empty without any.
            is_written: asks without waiting whether the ranks have written their copies; None: they take none.

        Raises:
            CheckpointError: there is not enough room, or the write failed, and checkpoint.on_full_disk is `error`;
                also when one of several ranks failed while the others wait for it.
            StateLost: a rank was lost while writing.
        """
        self.finish()
        target = self.folder / f"step-{state.step}"
        problem = self._lack_of_room(bytes_needed)
        if problem is not None:
            self._left_out(target, problem)
            return
        pending = PendingCheckpoint(target, Manifest.of(state, self._config, evaluation, self._data))
        with self._failures_of(pending, ranks_wait=self._config.policy.num_ranks > 1):
            pending.save(save_trainer, is_written)
            self._pending = pending
        if is_written is None:
            self.finish()

    def look(self) -> None:
        """Ends a checkpoint that is written beside the training, if it is complete by now; raises as `save`."""
        pending = self._pending
        if pending is None:
            return
        with self._failures_of(pending):
            if pending.is_complete():
                self._end(pending)

    def finish(self) -> None:
        """Waits for a checkpoint that is written beside the training, if there is one; raises as `save`."""
        pending = self._pending
        if pending is None:
            return
        with self._failures_of(pending):
            pending.wait()
            self._end(pending)

    def abandon(self) -> None:
        """After ranks were lost: a checkpoint whose files they had all written is completed, any other is given up."""
        if self._pending is not None and self._pending.is_sealing:
            self.finish()
        self._pending = None

    def _end(self, pending: PendingCheckpoint) -> None:
        self._pending = None
        self._thin_out(pending.target)
        self._say(f"checkpoint: {pending.target}")

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
        self.finish()
        if not self._settings.keep_best or value == math.inf:
            return False
        better = [path for path in self._numbered() if self._badness(self._evaluation_of(path)) <= value]
        return len(better) < self._settings.keep_best

    @contextmanager
    def _failures_of(self, pending: PendingCheckpoint, *, ranks_wait: bool = False) -> Iterator[None]:
        """Leaves nothing of a checkpoint that fails inside the `with` block; see checkpoint.on_full_disk.

        With `ranks_wait` the other ranks wait in the middle of DeepSpeed's save when one fails.
        """
        try:
            yield
        except StateLost:
            raise
        except (ActorError, OSError) as error:
            self._pending = None
            pending.remove()
            problem = f"{error}{self._room()}"
            if ranks_wait and isinstance(error, ActorError):
                raise CheckpointError(f"{pending.target} could not be written: {problem}") from error
            self._left_out(pending.target, problem)

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
