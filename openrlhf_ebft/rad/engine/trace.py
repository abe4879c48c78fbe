"""Rewards of the candidates of every step of a request, kept under an id until they are fetched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Traces that nobody fetches are dropped, oldest first, beyond this many.
MOST_TRACES = 4096


@dataclass(frozen=True)
class TraceStep:
    """One step of a request. K candidates, best incoming logit first.

    Attributes:
        candidates: K token ids.
        rewards: by reward model, K rewards in [0, 1], before `invert`.
        shift: K logit units that were added.
    """

    candidates: list[int]
    rewards: dict[str, list[float]]
    shift: list[float]


@dataclass
class RequestTrace:
    """Steps of one sequence, by the number of the response token that they decide.

    Attributes:
        tokens: the response tokens known so far (the engine's own, growing list).
        steps: by token number; a step that the engine threw away was overwritten by the one that counted.
        error: why the request could not be steered, or None.
        running: whether the sequence is in the engine's batch.
    """

    tokens: Sequence[int]
    steps: dict[int, TraceStep] = field(default_factory=dict)
    error: str | None = None
    running: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain data: `tokens`, `steps` (a list, one per response token) and `error`."""
        last = max(self.steps, default=-1)
        steps = [self.steps.get(number) for number in range(last + 1)]
        return {
            "tokens": [token for token in self.tokens if token >= 0],
            "steps": [None if step is None else vars(step) for step in steps],
            "error": self.error,
        }


class TraceStore:
    """All traces of an engine. One id may have several sequences (n > 1)."""

    def __init__(self) -> None:
        self._traces: OrderedDict[str, list[RequestTrace]] = OrderedDict()

    def open(self, trace_id: str, tokens: Sequence[int]) -> RequestTrace:
        """The trace of a sequence that joins the batch: a new one, or the one it had before it was preempted."""
        traces = self._traces.setdefault(trace_id, [])
        while len(self._traces) > MOST_TRACES:
            self._traces.popitem(last=False)
        for trace in traces:
            known = list(trace.tokens)
            if tokens and not trace.running and known and list(tokens[: len(known)]) == known:
                trace.tokens, trace.running = tokens, True
                return trace
        trace = RequestTrace(tokens)
        traces.append(trace)
        return trace

    def take(self, trace_id: str) -> list[dict[str, Any]]:
        """The sequences of an id as plain data, and forgets them; empty for an unknown id."""
        return [trace.as_dict() for trace in self._traces.pop(trace_id, [])]


class ErrorStore:
    """Reasons of requests that had to be ended, by the id that the request gave; bounded like traces."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def put(self, report_id: str, reason: str) -> None:
        """Keeps the first reason of an id."""
        self._reasons.setdefault(report_id, reason)
        while len(self._reasons) > MOST_TRACES:
            self._reasons.popitem(last=False)

    def take(self, report_id: str) -> str | None:
        """The reason of an id, forgotten afterwards; None when nothing went wrong."""
        return self._reasons.pop(report_id, None)


def token_rewards(trace: dict[str, Any], token_ids: Sequence[int]) -> list[dict[str, float] | None]:
    """For each response token its reward by reward model, or None where it was no candidate of its step.

    Args:
        trace: one sequence of `TraceStore.take`.
        token_ids: the response as the engine returned it.
    """
    rewards: list[dict[str, float] | None] = []
    for number, token in enumerate(token_ids):
        step = trace["steps"][number] if number < len(trace["steps"]) else None
        if step is None or token not in step["candidates"]:
            rewards.append(None)
            continue
        place = step["candidates"].index(token)
        rewards.append({name: values[place] for name, values in step["rewards"].items()})
    return rewards


def trace_of(traces: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> dict[str, Any] | None:
    """The sequence among `traces` that gave `token_ids` (its last token may not be known to the trace), or None."""
    wanted = list(token_ids)
    for trace in traces:
        known = trace["tokens"]
        if len(wanted) - 1 <= len(known) <= len(wanted) and wanted[: len(known)] == known:
            return trace
    return None
