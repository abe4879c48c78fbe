"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from openrlhf_ebft.data.batches import BatchPlan, DataCursor


@dataclass(frozen=True)
class TrainerState:
    """Everything that the controller must remember; all else follows from the configuration."""

    step: int = 0  # optimizer steps tried, warm-up included
    cursor: DataCursor = field(default_factory=DataCursor)
    nonfinite_total: int = 0
    nonfinite_in_a_row: int = 0


@dataclass(frozen=True)
class Schedule:
    """Lengths of the run's phases, in batches of references."""

    sft_steps: int
    ebft_steps: int
    epochs: int | None = None  # EBFT covers this many whole epochs; None: a number of steps was set instead
    updates_per_step: int = 1  # optimizer steps of one EBFT step

    @property
    def total(self) -> int:
        """Steps of the whole run: batches of references."""
        return self.sft_steps + self.ebft_steps

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, as the learning-rate schedule counts them."""
        return self.sft_steps + self.ebft_steps * self.updates_per_step

    def next_rows(self, plan: BatchPlan, state: TrainerState) -> tuple[list[int], DataCursor]:
        """Rows of the step that follows `state`, and the cursor after it.

        EBFT over whole epochs begins a fresh one: rows that the warm-up has used up come again, each once per epoch.
        """
        if self.epochs is None or state.step < self.sft_steps:
            return plan.next_batch(state.cursor)
        first = plan.epoch_after(self.sft_steps)
        cursor = state.cursor if state.cursor.epoch >= first else DataCursor(first)
        return plan.next_batch(cursor, self.epochs, first)
