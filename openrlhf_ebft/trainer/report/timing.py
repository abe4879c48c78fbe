"""Where the time of a run went, as bars."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf_ebft.trainer.report.load import RunData
from openrlhf_ebft.trainer.report.sections import escape, render_table, swatch

_STEP = "time/step_s"
_COLOURS = 6


def phase_seconds(run: RunData) -> dict[str, float]:
    """Seconds of each phase over all records; `evaluation` for whole evaluations, `other` for a step's rest."""
    totals: dict[str, float] = {}
    for record in run.records:
        whole = record.values.get(_STEP)
        if whole is None:
            continue
        parts = {
            name.removeprefix("time/").removesuffix("_s"): value
            for name, value in record.values.items()
            if name.startswith("time/") and name.endswith("_s") and name != _STEP and value is not None
        }
        if record.phase == "evaluation" and not parts:
            parts = {"evaluation": whole}
        parts["other"] = max(whole - sum(parts.values()), 0.0)
        for name, value in parts.items():
            totals[name] = totals.get(name, 0.0) + value
    rest = totals.pop("other", 0.0)
    return totals | ({"other": rest} if rest > 0 else {})


def time_bars(runs: Sequence[RunData]) -> str:
    """One bar a run, on a common scale, with the numbers below."""
    seconds = [phase_seconds(run) for run in runs]
    names = list(dict.fromkeys(name for phases in seconds for name in phases))
    longest = max((sum(phases.values()) for phases in seconds), default=0.0)
    if longest == 0:
        return '<p class="dim">No times have been recorded.</p>'
    colour = {name: f"time{min(i, _COLOURS - 1)}" for i, name in enumerate(names)}
    parts = []
    rows = []
    for number, (run, phases) in enumerate(zip(runs, seconds, strict=True)):
        total = sum(phases.values())
        spans = "".join(
            f'<span class="{colour[name]}" style="flex:{value / longest:.4f} 0 0" '
            f'title="{escape(name)}: {value:.1f} s ({value / total:.0%})"></span>'
            for name, value in phases.items()
        )
        rest = f'<span style="flex:{1 - total / longest:.4f} 0 0;background:none"></span>' if total < longest else ""
        parts.append(f'<h3>{swatch(number)} {escape(run.label)}</h3><div class="bar">{spans}{rest}</div>')
        cells = (f"{phases[n]:.1f}&nbsp;s ({phases[n] / total:.0%})" if n in phases else "-" for n in names)
        rows.append([f"{swatch(number)} {escape(run.label)}", f"{total:.1f}&nbsp;s", *cells])
    keys = "".join(f'<span><i class="{colour[name]}"></i>{escape(name)}</span>' for name in names)
    table = render_table(["run", "all", *map(escape, names)], rows, numbers_from=1)
    return f'<div class="card"><div class="keys">{keys}</div>{"".join(parts)}{table}</div>'
