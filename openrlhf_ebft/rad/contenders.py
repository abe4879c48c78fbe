"""How many of a step's candidates can still become the best one: all that greedy decoding has to score.

A shift lies between 0 and a known most. A candidate whose score plus that stays below the best sum found so far cannot
be taken, whatever its value is.
"""

from __future__ import annotations

import torch

# The guess, as a share of the most: what the best candidate is sure to gain, below the least of the last steps.
_MARGIN = 0.01
_FORGET = 0.01  # it rises again by this share in a step
_TOGETHER = 4  # few different shapes: matrix libraries compile a kernel for every new one
# Sums in float32 round: a little more than the most is what a shift is sure not to exceed.
ABOVE = 1 + 1e-6


def least_gain(before: float | None, share: float) -> float:
    """The least share of the most that the best candidate gained in the last steps, now that it gained `share`."""
    return share if before is None else min(share, before + _FORGET)


class Contenders:
    """Counts contenders over the steps of one generate call; candidates [B, K] are sorted, best score first."""

    def __init__(self, most: float) -> None:
        """`most` is the largest possible shift, > 0."""
        self._most = most * ABOVE
        self._least: float | None = None  # of the last steps: gain of the best sum over the best score, by `most`

    def guess(self, scores: torch.Tensor) -> int:
        """How many to score first, at least 1: as many as would do if this step were like the last ones.

        Args:
            scores: [B, K] float32.
        """
        gain = 0.0 if self._least is None else self._most * max(self._least - _MARGIN, 0.0)
        return self._count(scores, scores[:, 0] + gain)

    def needed(self, scores: torch.Tensor, best: torch.Tensor) -> int:
        """How many must be scored, now that a row's best sum [B] so far is known; remembers it for the next guess."""
        gain = (best - scores[:, 0]).nan_to_num(0.0, posinf=0.0, neginf=0.0)
        self._least = least_gain(self._least, float(gain.min()) / self._most)
        return self._count(scores, best)

    def _count(self, scores: torch.Tensor, certain: torch.Tensor) -> int:
        count = int((scores + self._most >= certain[:, None]).sum(1).max())
        return min(-(-max(count, 1) // _TOGETHER) * _TOGETHER, scores.size(1))
