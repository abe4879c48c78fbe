"""Reads what a run left in its directory, for a report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.yaml_io import parse_yaml

MAX_RUNS = 8
"""Most runs of one report: more colours than these cannot be told apart."""

RESULTS = "results.json"
"""Written at the end of a run: paired changes of the held-out values, and samples as text."""

_NO_METRICS = ("step", "phase", "skipped_because", "skipped_examples")  # entries of a record that are no numbers


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl."""

    step: int
    phase: str  # sft, ebft or evaluation
    values: dict[str, float | None]  # None: the value was not finite, or the record has none


@dataclass(frozen=True)
class RunData:
    """Everything that a report shows of one run."""

    label: str
    folder: Path
    config: dict[str, Any]  # by key path, such as `rollout.temperature`
    records: tuple[Record, ...]
    results: dict[str, Any]  # `changes` and `samples`; empty while the run is not at its end
    finished: bool  # the final model is there
    cut_off: bool  # the last line of metrics.jsonl is incomplete: the run was ended while it wrote

    def of_phase(self, phase: str) -> list[Record]:
        """Records of one phase, by step."""
        return sorted((record for record in self.records if record.phase == phase), key=lambda record: record.step)


def load_runs(folders: Sequence[Path]) -> list[RunData]:
    """Reads several runs; each gets a label of its own.

    Raises:
        UserError: no run, too many, the same twice, or a folder that holds no run.
    """
    if not 1 <= len(folders) <= MAX_RUNS:
        raise UserError(f"a report takes 1 to {MAX_RUNS} runs, got {len(folders)}")
    resolved = [folder.resolve() for folder in folders]
    for i, folder in enumerate(resolved):
        if folder in resolved[:i]:
            raise UserError(f"{folders[i]} is given twice: name each run once")
    names = [folder.name for folder in resolved]
    labels = [name if names.count(name) == 1 else str(folders[i]) for i, name in enumerate(names)]
    return [load_run(folder, label) for folder, label in zip(folders, labels, strict=True)]


def load_run(folder: Path, label: str | None = None) -> RunData:
    """Reads one run directory.

    Raises:
        UserError: names the file, and the line of metrics.jsonl, that is missing or cannot be read.
    """
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    for path in (metrics, config):
        if not path.is_file():
            raise UserError(f"{folder} is no run directory: it has no {path.name}")
    records, cut_off = _read_metrics(metrics)
    nested, _ = parse_yaml(config.read_text(encoding="utf-8"), str(config))
    if not isinstance(nested, dict):
        raise UserError(f"{config}: holds no sections")
    return RunData(
        label=label or folder.resolve().name,
        folder=folder,
        config=dict(_flatten(nested)),
        records=records,
        results=_read_results(folder / RESULTS),
        finished=(folder / "model").is_dir(),
        cut_off=cut_off,
    )


def _read_metrics(path: Path) -> tuple[tuple[Record, ...], bool]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    cut_off = bool(lines) and not lines[-1].endswith("\n")
    newest: dict[tuple[str, int], Record] = {}
    for number, line in enumerate(lines[:-1] if cut_off else lines, start=1):
        record = _read_record(line, f"{path}, line {number}")
        newest[(record.phase, record.step)] = record
    if not newest:
        raise UserError(f"{path} holds no record yet")
    return tuple(newest.values()), cut_off


def _read_record(line: str, where: str) -> Record:
    try:
        data = json.loads(line, parse_constant=lambda word: None)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(data, dict) or type(data.get("step")) is not int or not isinstance(data.get("phase"), str):
        raise UserError(f"{where}: must be an object with a whole number `step` and a text `phase`")
    values = {name: value for name, value in data.items() if name not in _NO_METRICS}
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{where}: {name} = {value!r} is no number")
    finite = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
    return Record(data["step"], data["phase"], finite)


def _read_results(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(results, dict):
        raise UserError(f"{path}: must be an object with `changes` and `samples`")
    return results


def _flatten(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
