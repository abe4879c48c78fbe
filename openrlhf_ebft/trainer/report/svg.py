"""Line charts as inline SVG, drawn once and readable without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf_ebft.trainer.report.panels import Point, Series

WIDTH, HEIGHT = 440, 230  # units of the view box, about one pixel each
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 30
_NOISE = 1e-12  # smaller values are what rounding leaves of zero


@dataclass(frozen=True)
class Scale:
    """Maps steps and values to units of the view box."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, step: float) -> float:
        """Horizontal place of a step."""
        return LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical place of a value; larger values are higher."""
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def fit_scale(series: Sequence[Series], steps: tuple[int, int]) -> Scale:
    """The scale that shows `steps` (first, last) and every value, with room around them.

    Room below never reaches under zero when no value does. A range that is only rounding noise is drawn as a flat line.
    """
    values = [value for line in series for _, value in line.points]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) if high - low > _NOISE else 0.1 * max(abs(low), abs(high))
    room = room if room > _NOISE else 0.5
    bottom = max(low - room, 0.0) if low >= 0 else low - room
    return Scale(steps[0], max(steps[1], steps[0] + 1), bottom, high + room)


def draw_chart(title: str, series: Sequence[Series], scale: Scale, marks: Sequence[tuple[int, int]]) -> str:
    """Returns the SVG element.

    Args:
        title: what is drawn, for readers of the page's text.
        series: at least one line with at least one point.
        scale: from `fit_scale`.
        marks: (step, number of the run) where a run's supervised warm-up ends.
    """
    parts = [*_axes(scale), *_warm_up(scale, marks)]
    for line in series:
        parts += _line(line, scale)
    label = html.escape(f"{title}: " + "; ".join(_summary(line) for line in series), quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="0" x2="0"/></svg>'
    )


def format_number(value: float) -> str:
    """Three significant digits; very large and very small numbers with an exponent, rounding noise as 0."""
    if abs(value) < _NOISE:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def nice_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About `count` round numbers in [low, high]: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _axes(scale: Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for value in nice_ticks(scale.y_low, scale.y_high, 4):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{format_number(value)}</text>')
    for step in nice_ticks(scale.x_low, scale.x_high, 5, whole=True):
        parts.append(f'<text class="tick middle" x="{scale.x(step):.1f}" y="{bottom + 17}">{step:.0f}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _warm_up(scale: Scale, marks: Sequence[tuple[int, int]]) -> list[str]:
    return [
        f'<line class="mark run{run}" x1="{scale.x(step):.1f}" x2="{scale.x(step):.1f}" '
        f'y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        for step, run in marks
        if scale.x_low <= step <= scale.x_high
    ]


def _line(line: Series, scale: Scale) -> list[str]:
    kind = "held-out" if line.held_out else "raw" if line.average else "line"
    parts = [_polyline(line.points, scale, f"{kind} run{line.run}")]
    if line.average:
        parts.append(_polyline(line.average, scale, f"line run{line.run}"))
    if line.held_out or len(line.points) == 1:
        parts += [
            f'<circle class="point run{line.run}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="3.5"/>'
            for step, value in line.points
        ]
    return parts


def _polyline(points: Sequence[Point], scale: Scale, classes: str) -> str:
    places = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in points)
    return f'<polyline class="{classes}" points="{places}"/>'


def _summary(line: Series) -> str:
    (first, start), (last, end) = line.points[0], line.points[-1]
    what = f"{line.label}, held-out" if line.held_out else line.label
    return f"{what}: {format_number(start)} at step {first}, {format_number(end)} at step {last}"
