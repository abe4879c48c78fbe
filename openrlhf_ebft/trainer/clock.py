"""Wall-clock time of a step's phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up the time of named phases since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block for `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """`time/PHASE_s` and `time/PHASE_share` of each phase, and `time/step_s`, in seconds and shares of the step."""
        total = time.perf_counter() - self._start
        result = {"time/step_s": total}
        for name, seconds in self._phases.items():
            result |= {f"time/{name}_s": seconds, f"time/{name}_share": seconds / total}
        return result
