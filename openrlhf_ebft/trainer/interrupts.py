"""Ctrl-C and SIGTERM: end cleanly, after a checkpoint if one is wanted."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns signals into `KeyboardInterrupt`, or first into a request to stop after the current step.

    Use as a context manager around a run, in the main thread.
    """

    def __init__(self, *, finish_step: bool, say: Callable[[str], None]) -> None:
        """With `finish_step` the first signal only sets `requested`; the second one always interrupts."""
        self.requested = False
        self._finish_step = finish_step
        self._say = say
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def shield(self) -> None:
        """From now on signals are ignored: actors are being ended, and must be ended completely."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._finish_step and not self.requested:
            self.requested = True
            self._say("stopping after this step; interrupt again to stop at once")
            return
        raise KeyboardInterrupt
