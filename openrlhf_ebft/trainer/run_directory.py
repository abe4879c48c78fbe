"""The folder of one run: configuration, metrics, checkpoints, model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf_ebft.config import dump_config
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig

PARTIAL = ".partial"


class RunDirectory:
    """Paths inside `logging.root/name`."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
        path = root / config.name
        if path.exists() and config.logging.existing_run == "error":
            raise UserError(
                f"run directory {path} exists: choose another name, or set logging.existing_run to move_aside"
            )
        return cls(path)

    def create(self, config: EBFTConfig) -> None:
        """Makes the folder and saves the resolved configuration in it.

        With logging.existing_run `move_aside` an old folder gets the next free number behind its name. Raises
        FileExistsError when another run has taken the name since `plan`.
        """
        if self.path.exists() and config.logging.existing_run == "move_aside":
            self.path.rename(_free_name(self.path))
        self.path.mkdir()
        (self.path / "config.yaml").write_text(dump_config(config), encoding="utf-8")

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
