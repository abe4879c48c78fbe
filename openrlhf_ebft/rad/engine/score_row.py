"""One request in a scoring step of one reward model."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf_ebft.rad.engine.prefix import StoredPrefix


@dataclass
class ScoreRow:
    """One request in a scoring step.

    Attributes:
        prefix: its stored prefix in this reward model's cache.
        tokens: its prefix, prompt and completion so far.
        candidates: K token ids.
        score_index, score_transform: how the output is read.
        refused: set by the scorer when the cache has no room for this row.
    """

    prefix: StoredPrefix
    tokens: list[int]
    candidates: list[int]
    score_index: int
    score_transform: str
    refused: bool = False

    @property
    def reading(self) -> tuple[int, str]:
        """What rows that are read alike have in common."""
        return self.score_index, self.score_transform
