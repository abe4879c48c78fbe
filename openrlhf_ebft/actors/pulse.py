"""Signs of life of an actor's process, given and watched beside its work.

A thread in the actor's process counts upwards in the cluster's key-value store. It stands still when the process is
stopped or dead, while a long computation lets it go on. The driver compares counts under its own clock, so the clocks
of different machines do not matter.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

_BEAT_S = 0.5


def start_pulse() -> None:
    """Lets the calling actor's process give signs of life until it ends."""
    key = _key(ray.get_runtime_context().get_actor_id())
    threading.Thread(target=_beat, args=(key,), name="pulse", daemon=True).start()


def _beat(key: bytes) -> None:
    count = 0
    while True:
        count += 1
        _internal_kv_put(key, str(count).encode(), overwrite=True)
        time.sleep(_BEAT_S)


def _key(actor_id: str) -> bytes:
    return f"openrlhf-ebft/pulse/{actor_id}".encode()


class Pulse:
    """The driver's view of one actor's signs of life. An actor that has given none yet is not judged."""

    def __init__(self, actor: Any, limit_s: float) -> None:
        """`limit_s`: silence after which the actor counts as hung, in seconds."""
        self.limit_s = limit_s
        self._key = _key(actor._actor_id.hex())
        self._count: bytes | None = None
        self._changed = 0.0

    def watch(self) -> None:
        """Begins a wait: silence counts from now, whatever the driver has missed before."""
        self._changed = time.monotonic()

    def is_silent(self) -> bool:
        """Whether the count has stood still for `limit_s` since `watch`."""
        count = _internal_kv_get(self._key)
        if count is None or count != self._count:
            self._count, self._changed = count, time.monotonic()
        return count is not None and time.monotonic() - self._changed > self.limit_s
