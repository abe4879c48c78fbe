"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from openrlhf_ebft.data.batches import DataCursor


@dataclass(frozen=True)
class TrainerState:
    """Everything that the controller must remember; all else follows from the configuration."""

    step: int = 0  # optimizer steps tried, warm-up included
    cursor: DataCursor = field(default_factory=DataCursor)
    nonfinite_total: int = 0
    nonfinite_in_a_row: int = 0


@dataclass(frozen=True)
class Schedule:
    """Lengths of the run's phases, in optimizer steps."""

    sft_steps: int
    ebft_steps: int

    @property
    def total(self) -> int:
        return self.sft_steps + self.ebft_steps
