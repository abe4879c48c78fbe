"""Which rows each step trains on, and a cursor that resumes exactly there."""

from __future__ import annotations

import random
from dataclasses import dataclass

from openrlhf_ebft.core.seeding import derive_seed


@dataclass(frozen=True)
class DataCursor:
    """The next row to use: a place in the order of an epoch. `dataclasses.asdict` gives what a checkpoint keeps."""

    epoch: int = 0  # from 0
    offset: int = 0  # rows of this epoch that are used up


class BatchPlan:
    """Seeded batches over rows 0 .. num_rows - 1: each row once per epoch, in a new order every epoch.

    A batch that an epoch leaves unfilled goes on with the next epoch's rows, so all batches have one size. A run of
    one epoch ends with a smaller batch instead of leaving rows unseen; in a run of several epochs every row has been
    seen by then, and a remainder below a batch is left out (`dropped_rows` says how many).
    With fewer rows than a batch asks for, a batch is one whole epoch: it never holds a row twice.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if num_rows < 1 or batch_size < 1:
            raise ValueError(f"num_rows = {num_rows} and batch_size = {batch_size} must both be at least 1")
        self.num_rows = num_rows
        self.batch_size = min(batch_size, num_rows)
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] = (-1, [])

    def total_steps(self, epochs: int) -> int:
        """Returns the number of batches of a run, which is also the length of its learning-rate schedule."""
        full, rest = divmod(self.num_rows * epochs, self.batch_size)
        return full + (1 if rest and epochs == 1 else 0)

    def dropped_rows(self, epochs: int) -> int:
        """Returns how many rows at the end of the last epoch are left out."""
        return 0 if epochs == 1 else self.num_rows * epochs % self.batch_size

    def epoch_after(self, batches: int) -> int:
        """Returns the first epoch that `batches` batches from the start leave untouched."""
        return -(-batches * self.batch_size // self.num_rows)

    def next_batch(
        self, cursor: DataCursor, epochs: int | None = None, first_epoch: int = 0
    ) -> tuple[list[int], DataCursor]:
        """Returns the rows of the batch at `cursor` and the cursor after it.

        With `epochs`, counted from `first_epoch`, the run's end ends the batch, too: a run of one epoch keeps a
        smaller last batch, and when nothing is left the batch is empty. Without, epochs go on for ever.
        """
        if not 0 <= cursor.offset <= self.num_rows:
            raise ValueError(f"cursor at offset {cursor.offset} of {self.num_rows} rows: made for other data")
        epoch, offset = cursor.epoch, cursor.offset
        batch: list[int] = []
        while len(batch) < self.batch_size:
            if offset == self.num_rows:
                epoch, offset = epoch + 1, 0
            if epochs is not None and epoch >= first_epoch + epochs:
                break
            taken = self.epoch_order(epoch)[offset : offset + self.batch_size - len(batch)]
            batch += taken
            offset += len(taken)
        if offset == self.num_rows:
            epoch, offset = epoch + 1, 0
        is_dropped = epochs is not None and epochs > 1 and len(batch) < self.batch_size
        return ([] if is_dropped else batch), DataCursor(epoch, offset)

    def epoch_order(self, epoch: int) -> list[int]:
        """Returns the order of all rows in an epoch (from 0); it depends on seed and epoch alone."""
        if not self._shuffle:
            return list(range(self.num_rows))
        if self._order[0] != epoch:
            order = list(range(self.num_rows))
            random.Random(derive_seed(self._seed, "data order", epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
