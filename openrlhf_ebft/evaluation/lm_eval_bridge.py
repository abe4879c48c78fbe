"""Tasks of the package lm-eval on a model folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.evaluation.optional import require


def run_lm_eval(
    model: str,
    tasks: Sequence[str],
    *,
    device: str,
    dtype: str,
    include: str | None,
    limit: int | None,
    seed: int,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Returns for each task its metrics, their standard errors, and the number of examples.

    Args:
        model: model folder or hub name.
        tasks: names of lm-eval tasks or groups.
        device: torch device.
        dtype: precision of the model.
        include: folder with task files of one's own.
        limit: examples of each task; None: all.
        seed: of every random choice of lm-eval.
        trust_remote_code: run code that the model's repository ships.
    Raises:
        UserError: lm-eval is not installed, or does not know a task.
    """
    lm_eval = require("lm_eval", f"evaluation.lm_eval_tasks = {list(tasks)}")
    from lm_eval.models.huggingface import HFLM
    from transformers import GenerationConfig

    manager = _task_manager(tasks, include)
    adapter = HFLM(pretrained=model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    # generate() fills every field that a task does not set from the model folder: only stop tokens may come from there.
    settings = adapter.model.generation_config
    adapter.model.generation_config = GenerationConfig(
        eos_token_id=settings.eos_token_id, pad_token_id=settings.pad_token_id, bos_token_id=settings.bos_token_id
    )
    output = lm_eval.simple_evaluate(
        model=adapter,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        log_samples=False,
    )
    counts = output["n-samples"]
    return {
        task: {name: _plain(value) for name, value in values.items() if name != "alias"}
        | ({"examples": counts[task]["effective"]} if task in counts else {})
        for task, values in output["results"].items()
    }


def _task_manager(tasks: Sequence[str], include: str | None) -> Any:
    """Knows all `tasks`; reads lm-eval's own task files only when they are needed, which takes a minute."""
    from lm_eval.tasks import TaskManager

    if include is not None:
        own = TaskManager(include_path=include, include_defaults=False)
        if all(own.match_tasks([task]) for task in tasks):
            return own
    manager = TaskManager(include_path=include)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(f"evaluation.lm_eval_tasks: lm-eval knows no task {', '.join(unknown)} (lm-eval ls tasks)")
    return manager


def _plain(value: Any) -> Any:
    """JSON has no NaN; lm-eval writes N/A where it has no standard error."""
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    return None if value == "N/A" else str(value)
