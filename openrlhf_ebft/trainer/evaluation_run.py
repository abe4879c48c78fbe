"""`openrlhf-ebft evaluate`: measures one model and gives the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from openrlhf_ebft.actors.cluster import RunActors
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.distributed.device import local_device
from openrlhf_ebft.evaluation.lm_eval_bridge import run_lm_eval
from openrlhf_ebft.evaluation.optional import require
from openrlhf_ebft.trainer.console import Console
from openrlhf_ebft.trainer.evaluation import evaluate
from openrlhf_ebft.trainer.interrupts import Interrupts
from openrlhf_ebft.trainer.run import on_cluster, prepare_run


def run_evaluation(config: EBFTConfig, out: Path | None, result_stream: TextIO) -> int:
    """Evaluates config.model.path on the held-out rows and by the configured tasks; returns the exit code.

    The result goes to `out`, and its path to `result_stream`; without `out` the result itself.

    Raises UserError for wrong input, before Ray starts.
    """
    console = Console(progress=False)
    settings = config.evaluation
    if settings.lm_eval_tasks:
        require("lm_eval", f"evaluation.lm_eval_tasks = {list(settings.lm_eval_tasks)}")
    run = prepare_run(config, console)
    if not run.heldout:
        raise UserError("no row is held out: set evaluation.max_examples and data.heldout_fraction above 0")
    console.say(f"{len(run.heldout)} held-out rows are evaluated")
    table: dict[str, Any] = {"model": config.model.path, "seed": config.seed}

    def work(actors: RunActors, interrupts: Interrupts) -> None:
        result = evaluate(actors, config, run.heldout)
        table["sampling"] = actors.rollout.effective_settings(config.rollout.timeout_s, "rollout settings")
        table.update(run.tasks.measure(result, actors))

    code = on_cluster(run, console, work)
    if code != 0:
        return code
    if settings.lm_eval_tasks:  # after the actors have ended: their memory is free again
        table["lm_eval"] = run_lm_eval(
            config.model.path,
            settings.lm_eval_tasks,
            device=str(local_device()),
            dtype=config.model.dtype,
            include=settings.lm_eval_include,
            limit=settings.lm_eval_limit,
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
        )
    text = json.dumps(table, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(out or text, file=result_stream, flush=True)
    return 0
