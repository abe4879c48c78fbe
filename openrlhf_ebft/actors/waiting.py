"""Bounded waits on actors: nothing waits for ever, and an error names the actor, the phase and its own text."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef

_IN_CONSTRUCTOR = "raised in its creation task"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class ActorError(RuntimeError):
    """A remote call failed. `cause` is the actor's own exception, when it raised one."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause

    @property
    def may_pass(self) -> bool:
        """Whether a repeated call may succeed: not with wrong input, nor on an actor that is stuck or gone."""
        return not isinstance(self, ActorTimeout | ActorGone) and not isinstance(self.cause, ValueError)


class ActorTimeout(ActorError):
    """A remote call did not finish within its limit."""


class ActorGone(ActorError):
    """The actor's process has ended."""


def wait_for(phase: str, names: Sequence[str], calls: Sequence[ObjectRef], timeout_s: float) -> list[Any]:
    """Returns the results of `calls` in order.

    Args:
        phase: what the caller is doing, for the message.
        names: the actor behind each call.
        calls: results to wait for.
        timeout_s: limit for all of them together, in seconds from now.

    Raises:
        ActorTimeout: names the actors that have not answered.
        ActorGone: names the first actor whose process has ended.
        ActorError: names the first actor that failed, with its exception's type and text.
    """
    pending = list(calls)
    results: dict[ObjectRef, Any] = {}
    end = time.monotonic() + timeout_s
    # The first failure ends the wait: the others may be stuck waiting for the actor that failed.
    while pending:
        done, still = ray.wait(pending, num_returns=1, timeout=max(end - time.monotonic(), 0))
        if not done:
            late = [name for name, call in zip(names, calls, strict=True) if call in still]
            raise ActorTimeout(f"{phase}: no answer from {', '.join(late)} within {timeout_s:g} s")
        results[done[0]] = _result(phase, names[calls.index(done[0])], done[0])
        pending = still
    return [results[call] for call in calls]


def _result(phase: str, name: str, call: ObjectRef) -> Any:
    """The value of a finished call, or its failure as an `ActorError`."""
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else None
        text = "".join(traceback.format_exception_only(cause)).strip() if cause else str(error)
        raise ActorError(f"{phase}: {name} failed: {text}", cause) from error
    except ray.exceptions.ActorDiedError as error:
        text = str(error)
        if _IN_CONSTRUCTOR in text:
            raise ActorError(f"{phase}: {name} failed: {_last_exception(text)}") from error
        cause = text.rpartition("\n")[2].partition(" Some common causes")[0]
        raise ActorGone(f"{phase}: {name} is gone: {cause} It was killed, or memory ran out (see dmesg).") from error
    except ray.exceptions.RayError as error:
        raise ActorGone(f"{phase}: {name} is gone: {error}") from error


def _last_exception(text: str) -> str:
    """Type and text of the exception at the end of a formatted traceback: what follows the frames."""
    lines = _COLOURS.sub("", text).rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    rest = lines[frames[-1] + 1 :] if frames else lines
    while rest and rest[0].startswith("    "):  # the frame's source and its marker
        rest = rest[1:]
    return "\n".join(rest)
