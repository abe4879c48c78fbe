"""The parts of a report around its charts: overview, warnings, held-out results, samples, configurations."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.report.load import RunData
from openrlhf_ebft.trainer.report.svg import format_number

_LABELS = {
    "ce": "cross-entropy of the ground truth",
    "perplexity": "perplexity of the ground truth",
    "alignment": "alignment",
    "diversity": "similarity to siblings",
    "reward": "reward",
    "reward_at_1": "reward at 1",
    "reward_best_of_n": "reward, best of n",
    "cfm_unbiased": "feature-matching loss, unbiased",
    "cfm": "feature-matching loss",
    "ngram_overlap": "n-gram overlap with the ground truth",
    "completion/length_ratio": "length / ground truth's",
    "completion/stopped_share": "share that stopped",
    "completion/duplicate_share": "share repeated in its group",
}
_OVERVIEW_KEYS = (
    "model.path",
    "data.path",
    "data.mode",
    "rollout.samples_per_prompt",
    "policy.prompts_per_step",
    "optimizer.learning_rate",
    "policy.ce_coef",
)


def escape(value: object) -> str:
    """Text of a run, safe inside an element or a quoted attribute."""
    return html.escape(str(value), quote=True)


def render_key(key: str) -> str:
    """A key of the configuration, which may go on in the next line behind a dot or an underscore."""
    return f"<code>{escape(key).replace('.', '.<wbr>').replace('_', '_<wbr>')}</code>"


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int | None = None) -> str:
    """Returns an HTML table of cells that are HTML already; columns from `numbers_from` hold numbers."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = ""
    for row in rows:
        cells = (
            f'<td class="number">{c}</td>' if numbers_from is not None and i >= numbers_from else f"<td>{c}</td>"
            for i, c in enumerate(row)
        )
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def swatch(number: int) -> str:
    """The colour of a run."""
    return f'<i class="swatch run{number}"></i>'


def overview(runs: Sequence[RunData]) -> str:
    """How far each run came, how long it took, and the keys that matter most; one column a run."""
    rows = [
        ["state", *("finished" if run.finished else "stopped or running" for run in runs)],
        ["supervised steps", *(str(len(run.of_phase("sft"))) for run in runs)],
        ["EBFT steps", *(str(len(run.of_phase("ebft"))) for run in runs)],
        ["time in steps and evaluations", *(_duration(_seconds(run)) for run in runs)],
    ]
    for key in _OVERVIEW_KEYS:
        if any(key in run.config for run in runs):
            rows.append([render_key(key), *(escape(run.config.get(key, "-")) for run in runs)])
    return f'<div class="card">{render_table(["", *_run_heads(runs)], rows)}</div>'


def _run_heads(runs: Sequence[RunData]) -> list[str]:
    return [f"{swatch(number)} {escape(run.label)}" for number, run in enumerate(runs)]


def _seconds(run: RunData) -> float:
    return sum(record.values.get("time/step_s") or 0.0 for record in run.records)


def warnings(runs: Sequence[RunData]) -> str:
    """What a reader should know before trusting a curve; empty when there is nothing."""
    found = [f"<b>{escape(run.label)}</b>: {text}" for run in runs for text in _warnings(run)]
    if not found:
        return ""
    return f'<div class="warnings"><b>Read with care</b><ul>{"".join(f"<li>{text}</li>" for text in found)}</ul></div>'


def _warnings(run: RunData) -> Iterator[str]:
    steps = run.of_phase("ebft")
    if run.cut_off:
        yield "the last line of metrics.jsonl is incomplete and left out: the run was ended while it wrote"
    failed = sum(record.values.get("applied") == 0 for record in [*run.of_phase("sft"), *steps])
    if failed:
        yield f"steps that changed no weight, because something was not finite: {failed}"
    ratios = [value for record in steps if (value := record.values.get("completion/length_ratio")) is not None]
    outside = sum(not 0.5 <= ratio <= 2 for ratio in ratios)
    if outside:
        yield (
            f"in {outside} of {len(ratios)} EBFT steps the completions were shorter than half or longer than twice the "
            "ground truth (mean): a policy that stops at once, or never, can have an excellent reward"
        )
    repeated = [value for record in steps if (value := record.values.get("completion/duplicate_share")) is not None]
    if repeated and sum(repeated) / len(repeated) > 0.5:
        yield "more than half of the completions repeat a sibling: the groups hold little to learn from"


def held_out_table(runs: Sequence[RunData]) -> str:
    """First and last evaluation of each run, and the paired change where the run is at its end."""
    names = [name for name in _LABELS if any(_evaluated(run, name) for run in runs)]
    if not names:
        return '<p class="dim">No held-out evaluation has been recorded.</p>'
    rows = [[_LABELS[name], *(_before_after(run, name) for run in runs)] for name in names]
    head = ["mean of the examples", *_run_heads(runs)]
    note = "First and last evaluation; in brackets the paired change with its standard error, once a run has ended."
    return f'<div class="card">{render_table(head, rows, numbers_from=1)}</div><p class="dim">{note}</p>'


def _evaluated(run: RunData, name: str) -> list[float]:
    return [value for record in run.of_phase("evaluation") if (value := record.values.get(name)) is not None]


def _before_after(run: RunData, name: str) -> str:
    values = _evaluated(run, name)
    if not values:
        return "-"
    if len(values) == 1:
        return format_number(values[0])
    text = f"{format_number(values[0])} &rarr; {format_number(values[-1])}"
    for change in run.results.get("changes", []):
        if change["name"] == name:
            error = change["standard_error"]
            spread = "" if error is None else f" &plusmn; {format_number(error)}"
            return f'{text} <span class="dim">({format_number(change["change"])}{spread})</span>'
    return text


def samples(runs: Sequence[RunData]) -> str:
    """Held-out examples with the completions of every run beside one another."""
    by_example: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for number, run in enumerate(runs):
        for sample in run.results.get("samples", []):
            by_example.setdefault((sample["example_id"], sample["prompt"]), []).append((number, sample))
    if not by_example:
        return '<p class="dim">No samples: a run writes them at its end (evaluation.show_samples).</p>'
    cards = []
    for (example, prompt), found in by_example.items():
        texts = [_text("ground truth", found[0][1]["ground_truth"])]
        before = {sample["before"] for _, sample in found}
        if len(before) == 1:
            texts.append(_text("before training", before.pop()))
        else:
            texts += [_text(f"{swatch(i)} {escape(runs[i].label)}, before", s["before"]) for i, s in found]
        texts += [_text(f"{swatch(i)} {escape(runs[i].label)}, after", s["after"]) for i, s in found]
        cards.append(
            f'<div class="card"><h3>Example {escape(example)}</h3><p class="dim">end of the prompt</p>'
            f'<pre>{escape(prompt)}</pre><div class="texts">{"".join(texts)}</div></div>'
        )
    return f'<div class="samples">{"".join(cards)}</div>'


def _text(heading: str, text: str) -> str:
    return f"<div><h4>{heading}</h4><pre>{escape(text)}</pre></div>"


def configurations(runs: Sequence[RunData]) -> str:
    """Keys in which runs differ; for a single run, the keys that are not at their default."""
    if len(runs) == 1:
        rows = [[render_key(key), _value(default), _value(value)] for key, default, value in _changed(runs[0])]
        return f'<div class="card">{render_table(["key", "default", escape(runs[0].label)], rows)}</div>'
    keys = sorted({key for run in runs for key in run.config})
    rows = []
    for key in keys:
        values = [run.config.get(key, "(no such key)") for run in runs]
        if any(value != values[0] for value in values):
            rows.append([render_key(key), *map(_value, values)])
    if not rows:
        return '<p class="dim">The configurations are equal.</p>'
    return f'<div class="card">{render_table(["key", *_run_heads(runs)], rows)}</div>'


def _changed(run: RunData) -> Iterator[tuple[str, object, object]]:
    """(key, default, value) of the keys whose value is not the default of this version."""
    for key, value in run.config.items():
        section, _, name = key.rpartition(".")
        model: Any = EBFTConfig
        if section:
            field = EBFTConfig.model_fields.get(section)
            model = field.annotation if field is not None else None
        known = model.model_fields.get(name) if model is not None else None
        if known is None:
            yield key, "(no such key in this version)", value
        elif known.is_required():
            yield key, "(required)", value
        elif _plain(known.get_default(call_default_factory=True)) != value:
            yield key, _plain(known.get_default(call_default_factory=True)), value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _value(value: object) -> str:
    return escape("null" if value is None else str(value).lower() if isinstance(value, bool) else value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
