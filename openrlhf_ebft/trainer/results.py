"""What a run leaves for its report: paired changes of the held-out values, and samples as text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from openrlhf_ebft.trainer.evaluation import PairedChange


def write_results(path: Path, changes: Sequence[PairedChange], samples: Sequence[dict[str, str]]) -> None:
    """Writes `changes` and `samples` as JSON; the standard error of a single example, which nothing tells, is null."""
    records = []
    for change in changes:
        error = change.standard_error
        records.append(
            {**asdict(change), "standard_error": error if math.isfinite(error) else None, "reading": change.reading}
        )
    content = {"changes": records, "samples": list(samples)}
    path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
