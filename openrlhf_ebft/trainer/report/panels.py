"""Which metrics a report draws, in which order, and how a run's records become series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openrlhf_ebft.trainer.report.load import RunData

_SMOOTHED_FROM = 60
"""Series of at least this many steps get a moving average over a twentieth of them."""

Point = tuple[int, float]


@dataclass(frozen=True)
class Panel:
    """One chart: training curves of one metric, with the held-out evaluations of its counterpart."""

    title: str
    note: str
    training: str  # metric of the steps
    evaluation: str | None = None  # metric of the evaluations


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    run: int  # number of the run: its colour
    held_out: bool
    points: tuple[Point, ...]
    average: tuple[Point, ...] = ()  # moving average, when there are many points


_CFM_NOTE = "unwhitened; lower is better"
_RATIO, _STOPPED, _REPEATED = "completion/length_ratio", "completion/stopped_share", "completion/duplicate_share"

GROUPS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Rewards and features",
        (
            Panel("Reward", "2 x alignment minus 2 x similarity, with their coefficients", "reward/mean", "reward"),
            Panel("Alignment", "cosine with the ground truth, whitened", "reward/alignment", "alignment"),
            Panel("Similarity to siblings", "the diversity term; lower: more diverse", "reward/diversity", "diversity"),
            Panel("Feature-matching loss (cfm), unbiased", _CFM_NOTE, "reward/cfm_unbiased", "cfm_unbiased"),
            Panel("Feature-matching loss (cfm)", _CFM_NOTE, "reward/cfm", "cfm"),
            Panel("Alignment without whitening", "raw cosine", "reward/raw_alignment"),
        ),
    ),
    (
        "Likelihood",
        (
            Panel("Cross-entropy of the ground truth", "nats a token; lower is better", "ce_loss", "ce"),
            Panel("Entropy of the policy", "nats a token of its completions", "entropy"),
        ),
    ),
    (
        "Completions",
        (
            Panel("Completion length", "mean, in tokens", "completion/length", "completion/length"),
            Panel("Length / ground truth's", "outside 0.5 to 2 the policy may be collapsing", _RATIO, _RATIO),
            Panel("Share that stopped", "by itself, before its limit", _STOPPED, _STOPPED),
            Panel("Share repeated in its group", "duplicates among siblings", _REPEATED, _REPEATED),
        ),
    ),
    (
        "Optimisation",
        (
            Panel("Loss", "weighted sum of its terms", "loss"),
            Panel("Gradient norm", "before clipping", "grad_norm"),
            Panel("Learning rate", "", "learning_rate"),
            Panel("Sampler-trainer mismatch", "mean |log-probability difference| a sampled token", "sampler_mismatch"),
            Panel("Seconds a step", "wall clock", "time/step_s"),
        ),
    ),
)


def panel_series(panel: Panel, runs: Sequence[RunData]) -> list[Series]:
    """The lines of one panel, without those that have no value."""
    found = []
    for number, run in enumerate(runs):
        for phases, metric in ((("sft", "ebft"), panel.training), (("evaluation",), panel.evaluation)):
            points = _points(run, phases, metric)
            if points:
                held_out = phases == ("evaluation",)
                parts = [] if held_out else [_points(run, (phase,), metric) for phase in phases]
                found.append(Series(run.label, number, held_out, points, _averages(parts)))
    return found


def other_panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    """A panel for each metric of the steps that no group draws, by name; shares of time have their own place."""
    drawn = {panel.training for _, panels in GROUPS for panel in panels}
    names = {name for run in runs for record in run.records if record.phase != "evaluation" for name in record.values}
    for name in sorted(names - drawn):
        if not name.startswith("time/"):
            yield Panel(name, "", name)


def _points(run: RunData, phases: Sequence[str], metric: str | None) -> tuple[Point, ...]:
    records = sorted((r for phase in phases for r in run.of_phase(phase)), key=lambda record: record.step)
    pairs = ((record.step, record.values.get(metric or "")) for record in records)
    return tuple((step, value) for step, value in pairs if value is not None)


def _averages(parts: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """Trailing means over a twentieth of all points, none across the border of two phases; nothing for short series."""
    total = sum(len(part) for part in parts)
    if total < _SMOOTHED_FROM:
        return ()
    window = total // 20
    averages = []
    for part in parts:
        values = [value for _, value in part]
        for i, (step, _) in enumerate(part):
            recent = values[max(0, i + 1 - window) : i + 1]
            averages.append((step, sum(recent) / len(recent)))
    return tuple(averages)
