"""Bounded waits on actors: nothing waits for ever, and an error names the actor, the phase and its own text."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import ObjectRef

from openrlhf_ebft.actors.pulse import Pulse

_IN_CONSTRUCTOR = "raised in its creation task"
_OUT_OF_MEMORY = re.compile(r"Memory on the node \((IP: [^,)]+).*?\) was (.*? used / .*? limit)", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOOK_S = 0.5  # time between looks at the pulses of actors that are waited for


class ActorError(RuntimeError):
    """A remote call failed. `cause` is the actor's own exception, when it raised one."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause

    @property
    def is_loss(self) -> bool:
        """Whether the actor is gone, stuck or out of memory: another in its place may do the work."""
        return isinstance(self, ActorGone | ActorHung | ActorTimeout) or _is_out_ofmemory_report(self.cause)

    @property
    def may_pass(self) -> bool:
        """Whether a repeated call to the same actor may succeed: not with wrong input, nor on a lost actor."""
        return not self.is_loss and not isinstance(self.cause, ValueError)


class ActorTimeout(ActorError):
    """A remote call did not finish within its limit."""


class ActorHung(ActorError):
    """The actor's process gives no sign of life."""


class ActorGone(ActorError):
    """The actor's process has ended."""


class StateLost(ActorError):
    """What a lost actor held can only come back from a checkpoint."""


class ResultLost(ActorError):
    """A result that the call needed has gone with the node that held it."""


def wait_for(
    phase: str, names: Sequence[str], calls: Sequence[ObjectRef], timeout_s: float, pulses: Sequence[Pulse] = ()
) -> list[Any]:
    """Returns the results of `calls` in order.

    Args:
        phase: what the caller is doing, for the message.
        names: the actor behind each call.
        calls: results to wait for.
        timeout_s: limit for all of them together, in seconds from now.
        pulses: the pulse of each actor; none: only the limit ends the wait for a process that has stopped.

    Raises:
        ActorTimeout: names the actors that have not answered.
        ActorHung: names the first actor without a sign of life.
        ActorGone: names the first actor whose process has ended.
        ActorError: names the first actor that failed, with its exception's type and text.
    """
    results: dict[int, Any] = {}
    # The first failure ends the wait: the others may be stuck waiting for the actor that failed.
    for number, outcome in outcomes(phase, names, calls, timeout_s, pulses):
        if isinstance(outcome, ActorError):
            raise outcome
        results[number] = outcome
    return [results[number] for number in range(len(calls))]


def outcomes(
    phase: str, names: Sequence[str], calls: Sequence[ObjectRef], timeout_s: float, pulses: Sequence[Pulse] = ()
) -> Iterator[tuple[int, Any]]:
    """Yields (number of the call, its result or its `ActorError`) as they come, one for each call; see `wait_for`."""
    numbers = {call: number for number, call in enumerate(calls)}
    watched = dict(zip(calls, pulses, strict=True)) if pulses else {}
    for pulse in watched.values():
        pulse.watch()
    pending = list(calls)
    end = time.monotonic() + timeout_s
    while pending:
        left = max(end - time.monotonic(), 0)
        done, pending = ray.wait(pending, num_returns=1, timeout=min(left, _LOOK_S) if watched else left)
        for call in done:
            yield numbers[call], _result(phase, names[numbers[call]], call)
        if done:
            continue
        for call in [call for call in pending if call in watched and watched[call].is_silent()]:
            pending.remove(call)
            yield numbers[call], _hung(phase, names[numbers[call]], watched[call])
        if left == 0 and pending:
            late = ", ".join(names[numbers[call]] for call in pending)
            yield from (
                (numbers[call], ActorTimeout(f"{phase}: no answer from {late} within {timeout_s:g} s"))
                for call in pending
            )
            return


def _is_out_ofmemory_report(cause: BaseException | None) -> bool:
    """Memory that Python, torch on a GPU, or torch on the CPU (a plain RuntimeError) did not get."""
    return (
        isinstance(cause, MemoryError)
        or type(cause).__name__ == "OutOfMemoryError"
        or (isinstance(cause, RuntimeError) and "can't allocate memory" in str(cause))
    )


def _hung(phase: str, name: str, pulse: Pulse) -> ActorHung:
    return ActorHung(
        f"{phase}: {name} hangs: its process has given no sign of life for {pulse.limit_s:g} s (recovery.heartbeat_s)"
    )


def _result(phase: str, name: str, call: ObjectRef) -> Any:
    """The value of a finished call, or its failure as an `ActorError`."""
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else None
        if isinstance(cause, ray.exceptions.ObjectLostError):
            return ResultLost(f"{phase}: {name} did not get its input: {_first_line(cause)}", cause)
        text = "".join(traceback.format_exception_only(cause)).strip() if cause else str(error)
        return ActorError(f"{phase}: {name} failed: {text}", cause)
    except ray.exceptions.ObjectLostError as error:
        return ResultLost(f"{phase}: the answer of {name} is lost: {_first_line(error)}", error)
    except ray.exceptions.ActorDiedError as error:
        text = str(error)
        if _IN_CONSTRUCTOR in text:
            return ActorError(f"{phase}: {name} failed: {_last_exception(text)}", error)
        if _OUT_OF_MEMORY.search(text):
            return ActorGone(f"{phase}: {name} is gone: {memory_report(text)}", error)
        cause_text = text.rpartition("\n")[2].partition(" Some common causes")[0]
        return ActorGone(f"{phase}: {name} is gone: {cause_text} It was killed, or memory ran out (see dmesg).", error)
    except ray.exceptions.RayError as error:
        text = str(error)
        return ActorGone(f"{phase}: {name} is gone: {memory_report(text) or _first_line(error)}", error)


def memory_report(text: str) -> str:
    """What Ray's memory monitor, which ends the workers of a full node, says of the node; empty in other texts."""
    found = _OUT_OF_MEMORY.search(text)
    return f"Ray ended it because its node ran out of memory ({found[1]}, {found[2]})" if found else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _last_exception(text: str) -> str:
    """Type and text of the exception at the end of a formatted traceback: what follows the frames."""
    lines = _COLOURS.sub("", text).rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    rest = lines[frames[-1] + 1 :] if frames else lines
    while rest and rest[0].startswith("    "):  # the frame's source and its marker
        rest = rest[1:]
    return "\n".join(rest)
