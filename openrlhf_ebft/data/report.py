"""What became of every row: used, changed or left out, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf_ebft.data.errors import DataError

_EXAMPLES_KEPT = 3


@dataclass
class DataReport:
    """Counts of a pass over the data. In strict mode a faulty row is an error instead of a count."""

    strict: bool
    rows_read: int = 0
    train_rows: int = 0
    heldout_rows: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> rows left out
    changed: dict[str, int] = field(default_factory=dict)  # reason -> rows used in changed form
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason -> first rows it applied to
    notes: list[str] = field(default_factory=list)

    def fault(self, place: str, reason: str, detail: str) -> None:
        """Counts a faulty row as left out.

        Raises:
            DataError: in strict mode, with the place (file and row) and the detail.
        """
        if self.strict:
            raise DataError(f"{place}: {detail} (data.on_bad_row = skip leaves such rows out)")
        self.skip(place, reason, detail)

    def skip(self, place: str, reason: str, detail: str) -> None:
        """Counts a row as left out by a limit that the configuration sets."""
        self._count(self.skipped, place, reason, detail)

    def change(self, place: str, reason: str, detail: str) -> None:
        """Counts a row that is used in changed form."""
        self._count(self.changed, place, reason, detail)

    def note_unread(self, folder: Path, entries: Sequence[Path], why: str) -> None:
        """Notes what of a data folder is not read; nothing where that is nothing."""
        if entries:
            names = ", ".join(str(entry.relative_to(folder)) for entry in entries[:_EXAMPLES_KEPT])
            more = f" and {len(entries) - _EXAMPLES_KEPT} more" if len(entries) > _EXAMPLES_KEPT else ""
            self.notes.append(f"not read in {folder}: {names}{more} ({why})")

    @property
    def rows_skipped(self) -> int:
        """Rows left out, over all reasons."""
        return sum(self.skipped.values())

    def summary(self) -> str:
        """Returns the report as lines of text: totals, then each reason with its first rows."""
        total = f"data: {self.rows_read} rows read, {self.train_rows} for training, {self.heldout_rows} held out"
        lines = [f"{total}, {self.rows_skipped} left out"]
        for title, counts in (("left out", self.skipped), ("changed", self.changed)):
            for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
                lines.append(f"  {title}: {count} x {reason}")
                lines += [f"    {example}" for example in self.examples[reason]]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _count(self, counts: dict[str, int], place: str, reason: str, detail: str) -> None:
        counts[reason] = counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES_KEPT:
            examples.append(f"{place}: {detail}")
