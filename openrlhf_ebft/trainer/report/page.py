"""Puts a report together and writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from openrlhf_ebft import __version__
from openrlhf_ebft.trainer.report import sections, svg
from openrlhf_ebft.trainer.report.assets import SCRIPT, STYLE
from openrlhf_ebft.trainer.report.load import RunData, load_runs
from openrlhf_ebft.trainer.report.panels import GROUPS, Panel, other_panels, panel_series
from openrlhf_ebft.trainer.report.timing import time_bars


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Writes one HTML file about the runs in `folders`; it needs no network and no other file.

    Raises:
        UserError: a folder holds no run, or its files cannot be read.
    """
    page = render_page(load_runs(folders))
    aside = out.with_name(out.name + ".partial")
    aside.write_text(page, encoding="utf-8")
    aside.replace(out)


def render_page(runs: Sequence[RunData]) -> str:
    """Returns the whole page. Every text that comes from a run is escaped."""
    charts = _Charts(runs)
    groups = "".join(f"<h2>{title}</h2>{charts.grid(panels)}" for title, panels in GROUPS if charts.any(panels))
    more = charts.grid(other_panels(runs))
    title = sections.escape(", ".join(run.label for run in runs))
    count = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="dim">Report of {count}, openrlhf-ebft {__version__}. '
        "Rewards and features are those of the frozen feature network.</p>",
        sections.warnings(runs),
        _legend(runs),
        f"<h2>Overview</h2>{sections.overview(runs)}",
        f"<h2>Held-out results</h2>{sections.held_out_table(runs)}",
        groups,
        f"<h2>Where the time went</h2>{time_bars(runs)}",
        f"<h2>Samples</h2>{sections.samples(runs)}",
        f"<h2>{'Configuration, where not the default' if len(runs) == 1 else 'Differences of the configurations'}</h2>",
        sections.configurations(runs),
        f"<details><summary>All other metrics</summary>{more}</details>" if more else "",
    ]
    # "<" must not end the script element early, whatever a run is called.
    series = json.dumps(charts.data(), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main>"
        f'<script type="application/json" id="series">{series}</script><script>{SCRIPT}</script></body></html>\n'
    )


def _legend(runs: Sequence[RunData]) -> str:
    boxes = "".join(
        f'<label class="run{i}"><input type="checkbox" value="{i}" checked>{sections.swatch(i)}'
        f"{sections.escape(run.label)}</label>"
        for i, run in enumerate(runs)
    )
    return (
        f'<div class="legend">{boxes}<span class="dim">line: training steps; dotted with circles: held-out; '
        "dashed upright: the supervised warm-up ends</span></div>"
    )


class _Charts:
    """Draws panels and keeps their numbers for the script."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self._runs = runs
        self._lines: dict[str, dict[str, Any]] = {}
        steps = [record.step for run in runs for record in run.records]
        self._steps = (min(steps), max(steps))  # of every chart, so that they can be compared
        self._marks = [
            (run.of_phase("sft")[-1].step, number)
            for number, run in enumerate(runs)
            if run.of_phase("sft") and run.of_phase("ebft")
        ]

    def any(self, panels: Iterable[Panel]) -> bool:
        """Whether any of the panels has a value."""
        return any(panel_series(panel, self._runs) for panel in panels)

    def grid(self, panels: Iterable[Panel]) -> str:
        """The panels that have values, side by side; empty text when none has."""
        figures = [figure for panel in panels if (figure := self._figure(panel))]
        return f'<div class="grid-of-charts">{"".join(figures)}</div>' if figures else ""

    def _figure(self, panel: Panel) -> str:
        series = panel_series(panel, self._runs)
        if not series:
            return ""
        scale = svg.fit_scale(series, self._steps)
        lines = [
            {"run": line.run, "label": line.label, "heldOut": line.held_out, "points": line.points} for line in series
        ]
        name = f"chart{len(self._lines)}"
        self._lines[name] = {"low": scale.x_low, "high": scale.x_high, "lines": lines}
        return (
            f'<figure data-chart="{name}"><h3>{sections.escape(panel.title)}</h3>'
            f"<figcaption>{sections.escape(panel.note)}</figcaption>"
            f'{svg.draw_chart(panel.title, series, scale, self._marks)}<div class="tip"></div></figure>'
        )

    def data(self) -> dict[str, Any]:
        """Numbers of all drawn charts, with the frame they are drawn in."""
        return {"width": svg.WIDTH, "left": svg.LEFT, "right": svg.RIGHT, "charts": self._lines}
