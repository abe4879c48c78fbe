"""What a person sees: progress bars, one line a step, the table and the samples at the end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from openrlhf_ebft.trainer.evaluation import EvaluationResult, PairedChange

_LABELS = {
    "ce": "cross-entropy of the ground truth",
    "alignment": "alignment",
    "diversity": "diversity term (similarity)",
    "reward": "reward",
    "function": "reward.function",
    "cfm_unbiased": "feature-matching loss, unbiased",
    "cfm": "feature-matching loss",
}
_BETTER = {
    "ce": "lower",
    "cfm_unbiased": "lower",
    "cfm": "lower",
    "alignment": "higher",
    "reward": "higher",
    "function": "higher",
}


class Console:
    """Prints to standard output; bars go to standard error, only when it is a terminal or bars are asked for."""

    def __init__(self, *, progress: bool) -> None:
        self._progress = progress
        self._bar: tqdm | None = None

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        """Shows a bar of `total` units while the `with` block runs; `advance` moves it."""
        columns = shutil.get_terminal_size((100, 24)).columns  # tqdm draws nothing on a terminal of unknown width
        with tqdm(total=total, desc=name, disable=not self._progress, ncols=columns) as bar:
            outer, self._bar = self._bar, bar
            try:
                yield
            finally:
                self._bar = outer

    def advance(self, units: int = 1) -> None:
        """Moves the current bar."""
        if self._bar is not None:
            self._bar.update(units)

    def step(self, phase: str, number: int, total: int, metrics: dict[str, float | None]) -> None:
        """One readable line for one step."""
        self.say(f"{phase} {number}/{total} | " + " | ".join(_step_parts(metrics)))

    def evaluation(self, step: int, metrics: dict[str, float | None]) -> None:
        """One line for one evaluation."""
        means = ", ".join(f"{key} {_number(metrics[key], 4)}" for key in ("ce", "cfm_unbiased", "alignment", "reward"))
        self.say(f"evaluation after step {step} | {means}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _step_parts(metrics: dict[str, float | None]) -> Iterator[str]:
    def text(key: str, digits: int = 3) -> str:
        return _number(metrics.get(key), digits)

    if "reward/mean" in metrics:
        yield f"reward {text('reward/mean')} (align {text('reward/alignment')}, similar {text('reward/diversity')})"
        yield f"cfm {text('reward/cfm_unbiased')}"
        yield (
            f"length {text('completion/length', 0)} (x{text('completion/length_ratio', 2)}), "
            f"stopped {_percent(metrics['completion/stopped_share'])}, "
            f"repeated {_percent(metrics['completion/duplicate_share'])}"
        )
    yield f"ce {text('ce_loss')}"
    if "kl" in metrics:
        yield f"kl {text('kl')}"
    if "policy/clipped_share" in metrics:
        yield f"clipped {_percent(metrics['policy/clipped_share'])}"
    yield f"grad {text('grad_norm', 2)}"
    if metrics.get("applied") == 0:
        yield "NOT APPLIED"
    phases = [name for name in metrics if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"]
    shown = ", ".join(f"{name[5:-2]} {text(name, 1)}" for name in phases)
    yield f"{text('time/step_s', 1)} s ({shown})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def comparison_table(changes: Sequence[PairedChange], before: EvaluationResult, after: EvaluationResult) -> str:
    """The table before/after on held-out examples: paired change, its standard error, and how to read it."""
    rows = [("held-out, mean of examples", "before", "after", "change", "reading")]
    for change in changes:
        better = _BETTER.get(change.name)
        reading = change.reading
        if better is not None and reading in ("lower", "higher"):
            reading = f"{reading} ({'better' if reading == better else 'worse'})"
        rows.append(
            (
                _LABELS[change.name],
                f"{change.before:.4f}",
                f"{change.after:.4f}",
                f"{change.change:+.4f} +- {change.standard_error:.4f}",
                reading,
            )
        )
    shapes = (before.completions, after.completions)
    rows.append(("completion length / ground truth's", *(f"{s.length_ratio:.2f}" for s in shapes), "", ""))
    rows.append(("completions that stopped", *(_percent(s.stopped_share) for s in shapes), "", ""))
    rows.append(("repeated completions of a group", *(_percent(s.duplicate_share) for s in shapes), "", ""))
    return aligned(rows) + f"\n{len(after.examples)} examples; change +- its standard error, same prompts and seeds"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first left-aligned, a rule below the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
