"""A checkpoint between its first byte and its rename: ranks write their files, then the folder is sealed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from openrlhf_ebft.trainer.manifests import Manifest, write_manifest
from openrlhf_ebft.trainer.run_directory import PARTIAL, written_aside

TRAINER = "trainer"
"""Folder inside a checkpoint that the trainer's ranks write."""
_LOOK_S = 0.1  # time between looks at ranks that still write


class PendingCheckpoint:
    """Written beside `target` until it is complete; then it takes that place in one rename.

    Hashing and flushing happen in a thread of this process. No method waits but `save` and `wait`.
    """

    def __init__(self, target: Path, manifest: Manifest) -> None:
        self.target = target
        self._manifest = manifest
        self._stack = ExitStack()
        self._is_written: Callable[[], bool] = lambda: True
        self._sealed: Future[None] | None = None

    def save(self, save_trainer: Callable[[Path], None], is_written: Callable[[], bool] | None) -> None:
        """Makes the ranks write, or with `is_written` take a copy that they write by and by.

        Args:
            save_trainer: makes the trainer's ranks save into a folder.
            is_written: asks without waiting whether all of them have written; raises what went wrong. None: they have
                when `save_trainer` returns.
        """
        self._aside = self._stack.enter_context(written_aside(self.target))
        (self._aside / TRAINER).mkdir()
        save_trainer(self._aside / TRAINER)
        self._is_written = is_written or self._is_written

    @property
    def is_sealing(self) -> bool:
        """Whether all ranks have written."""
        return self._sealed is not None

    def is_complete(self) -> bool:
        """Whether the checkpoint is in its place. Raises what went wrong: ActorError of a rank, OSError of this
        process."""
        if self._sealed is None:
            if not self._is_written():
                return False
            pool = ThreadPoolExecutor(1, "checkpoint")
            self._sealed = pool.submit(self._seal)
            pool.shutdown(wait=False)
        if not self._sealed.done():
            return False
        self._sealed.result()
        return True

    def wait(self) -> None:
        """Waits until the checkpoint is in its place; raises as `is_complete`."""
        while not self.is_complete():
            if self._sealed is None:
                time.sleep(_LOOK_S)
            else:
                self._sealed.result()

    def remove(self) -> None:
        """Removes what was written of a checkpoint that failed."""
        if self._sealed is not None:
            self._sealed.exception()  # waits: nothing writes any more
        shutil.rmtree(self.target.with_name(self.target.name + PARTIAL), ignore_errors=True)

    def _seal(self) -> None:
        write_manifest(self._aside, self._manifest)
        self._stack.close()
