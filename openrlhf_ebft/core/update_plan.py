"""Several optimizer steps on one batch of rollouts: which trees each takes, and what is reported of all together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

LAST = ("learning_rate",)
"""Metrics of which the last update's value is reported."""

SMALLEST = ("applied",)
"""Metrics of which the smallest value is reported: one update that was not applied shows."""


def plan_updates(num_items: int, updates: int, mini_batches: int) -> list[list[int]]:
    """Item numbers of each update: the batch is cut into mini-batches of nearly equal size, taken in turn.

    Args:
        num_items: trees of the batch; with fewer trees than mini-batches each mini-batch is one tree.
        updates: optimizer steps, at least 1.
        mini_batches: parts of the batch, at least 1.

    Raises:
        ValueError: a number below 1.
    """
    if min(num_items, updates, mini_batches) < 1:
        raise ValueError(f"need trees, updates and mini-batches, got {num_items}, {updates} and {mini_batches}")
    parts = min(mini_batches, num_items)
    edges = [part * num_items // parts for part in range(parts + 1)]
    cut = [list(range(start, stop)) for start, stop in itertools.pairwise(edges)]
    return [cut[update % parts] for update in range(updates)]


def combine_updates(metrics: Sequence[Mapping[str, float]], planned: int) -> dict[str, float]:
    """Means over the updates of one batch, except for `LAST` and `SMALLEST`; if one was `planned`, its own values."""
    if planned == 1:
        return dict(metrics[0])
    combined = {name: sum(update[name] for update in metrics) / len(metrics) for name in metrics[0]}
    combined |= {name: metrics[-1][name] for name in LAST}
    combined |= {name: min(update[name] for update in metrics) for name in SMALLEST}
    return combined | {"updates_applied": sum(update["applied"] for update in metrics)}
