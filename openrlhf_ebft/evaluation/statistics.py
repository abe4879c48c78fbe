"""Estimates with their uncertainty: pass@k, and seeded bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
"""Coverage of every interval."""


@dataclass(frozen=True)
class Estimate:
    """A value over a sample of examples, with its percentile bootstrap interval."""

    value: float
    low: float | None  # None for a single example, whose spread nothing tells
    high: float | None
    count: int  # examples


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    1 - C(samples - correct, k) / C(samples, k): the share of subsets of k samples that hold a correct one (Chen et al.
    2021, arXiv 2107.03374, section 2.1).

    Raises:
        ValueError: numbers that do not fit one another.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs k between 1 and the number of samples, {samples}")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct samples of {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def bootstrap_mean(values: Sequence[float], *, seed: int, resamples: int) -> Estimate:
    """The mean of one value an example.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    return bootstrap([(value,) for value in values], lambda means: means[..., 0], seed=seed, resamples=resamples)


def bootstrap(
    rows: Sequence[Sequence[float]],
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    seed: int,
    resamples: int,
) -> Estimate:
    """A statistic of the means of several values an example, such as the ratio of two.

    Args:
        rows: N examples of D values.
        statistic: from means (..., D) to values (...).
        seed: of the resampling; the same seed gives the same interval.
        resamples: draws of N examples with replacement.
    Raises:
        ValueError: no row, or a value that is not finite.
    """
    table = np.asarray(rows, dtype=np.float64)
    if table.ndim != 2 or len(table) == 0:
        raise ValueError("no example to measure")
    if not np.isfinite(table).all():
        raise ValueError(f"example {int(np.argmin(np.isfinite(table).all(-1)))} holds a value that is not finite")
    value = float(statistic(table.mean(0)))
    if len(table) == 1:
        return Estimate(value, None, None, 1)
    generator = np.random.default_rng(seed)
    means = np.stack([table[generator.integers(0, len(table), len(table))].mean(0) for _ in range(resamples)])
    low, high = np.quantile(statistic(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), len(table))
