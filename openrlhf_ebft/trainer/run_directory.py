"""The folder of one run: configuration, metrics, checkpoints, model."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from openrlhf_ebft.config import dump_config, load_config
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig

PARTIAL = ".partial"


class RunDirectory:
    """Paths inside `logging.root/name`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None

    @classmethod
    def of(cls, config: EBFTConfig) -> RunDirectory:
        """The run directory that `config` names, whether it exists or not."""
        return cls(Path(config.logging.root) / config.name)

    @classmethod
    def plan(cls, config: EBFTConfig) -> RunDirectory:
        """The run directory of `config`, which `create` makes later.

        Raises UserError if it cannot be made: it exists and logging.existing_run is `error`, or logging.root is no
        folder to write to.
        """
        root = Path(config.logging.root)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"logging.root = {root}: cannot be made: {error.strerror}") from None
        if not os.access(root, os.W_OK):
            raise UserError(f"logging.root = {root}: no permission to write")
        folder = cls.of(config)
        if folder.path.exists() and config.logging.existing_run == "error":
            raise UserError(
                f"run directory {folder.path} exists: choose another name, or set logging.existing_run to move_aside, "
                "or go on with the run there (--resume auto)"
            )
        return folder

    def create(self, config: EBFTConfig) -> None:
        """Makes the folder and saves the resolved configuration in it.

        With logging.existing_run `move_aside` an old folder gets the next free number behind its name. Raises
        FileExistsError when another run has taken the name since `plan`.
        """
        if self.path.exists() and config.logging.existing_run == "move_aside":
            self.lock()
            self.move_aside()
        self.path.mkdir()
        self.lock()
        self.config.write_text(dump_config(config), encoding="utf-8")

    def lock(self) -> None:
        """Claims the folder until this process ends or calls `unlock`.

        Raises UserError when another process holds it: two runs in one folder would mix their records.
        """
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process works in {self.path}: wait for its end, or end it first") from None

    def unlock(self) -> None:
        """Gives the claim back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def move_aside(self) -> Path:
        """Renames the folder to the next free number behind its name, gives the claim back, returns the new name."""
        aside = _free_name(self.path)
        self.path.rename(aside)
        self.unlock()
        return aside

    def saved_config(self) -> EBFTConfig:
        """The configuration that the run was started or last resumed with."""
        return load_config(self.config)

    def replace_config(self, config: EBFTConfig, step: int) -> None:
        """Saves the configuration that holds after `step`; one that differs is kept beside it."""
        text = dump_config(config)
        old = self.config.read_text(encoding="utf-8")
        if old != text:
            (self.path / f"config-until-step-{step}.yaml").write_text(old, encoding="utf-8")
            aside = self.config.with_suffix(".yaml" + PARTIAL)
            aside.write_text(text, encoding="utf-8")
            aside.replace(self.config)

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Complete checkpoints, one folder each."""
        return self.path / "checkpoints"

    @property
    def rollout_settings(self) -> Path:
        """Every sampling and engine value that the rollout engines report as in force."""
        return self.path / "rollout-settings.json"

    @property
    def first_evaluation(self) -> Path:
        """Result of the evaluation before training."""
        return self.path / "evaluation-before.json"

    @property
    def results(self) -> Path:
        """Paired changes of the held-out values and samples as text, at the end of the run."""
        return self.path / "results.json"

    @property
    def report(self) -> Path:
        """The run on one HTML page."""
        return self.path / "report.html"

    @property
    def model(self) -> Path:
        """Final model in Hugging Face format."""
        return self.path / "model"

    @property
    def averaged_model(self) -> Path:
        """The same with averaged weights (policy.export_ema)."""
        return self.path / "model-ema"


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yields a folder to write to; on success it is flushed and takes the place of `target` in one rename.

    After a failure `target` is as it was, and nothing else looks like it.
    """
    aside = target.with_name(target.name + PARTIAL)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    _flush(aside)
    if target.exists():
        old = target.with_name(target.name + ".old" + PARTIAL)
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    _sync_folder(target.parent)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
