"""What is measured beside the held-out loss: generated code, translations, and the table with all intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.actors.cluster import RunActors
from openrlhf_ebft.actors.waiting import ActorError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Reference, RolloutRequest
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.data.tokenizers import plain_text, stop_token_ids
from openrlhf_ebft.evaluation.code import Problem, load_problems, score_completions
from openrlhf_ebft.evaluation.optional import require
from openrlhf_ebft.evaluation.sandbox import SandboxLimits, run_program
from openrlhf_ebft.evaluation.statistics import bootstrap, bootstrap_mean
from openrlhf_ebft.evaluation.translation import score_comet, score_translations
from openrlhf_ebft.trainer.evaluation import EvaluationResult

FOLDER = "evaluations"
"""Folder of a run directory with one JSON file for each evaluation."""


@dataclass(frozen=True, eq=False)
class EvaluationTasks:
    """Everything that the tasks of a run need, checked before anything starts."""

    config: EBFTConfig
    tokenizer: PreTrainedTokenizerBase
    heldout: Sequence[Reference]
    problems: Sequence[Problem]
    references: Sequence[Reference]  # of the problems, in their order

    @classmethod
    def prepare(
        cls, config: EBFTConfig, tokenizer: PreTrainedTokenizerBase, heldout: Sequence[Reference]
    ) -> EvaluationTasks:
        """Loads problems, and tries what a task needs.

        Raises UserError for a missing package, a faulty file, and a machine that cannot confine generated code.
        """
        settings, problems = config.evaluation, []
        if "translation" in settings.tasks:
            require("sacrebleu", "evaluation.tasks = [translation]")
        if settings.comet_model is not None:
            require("comet", f"evaluation.comet_model = {settings.comet_model}")
        if "code" in settings.tasks:
            run_program("pass", _limits(config))
            problems = load_problems(settings.code_problems, settings.code_max_problems)
        references = [_problem_reference(problem, tokenizer, settings.code_max_new_tokens) for problem in problems]
        return cls(config, tokenizer, heldout, problems, references)

    def measure(self, result: EvaluationResult, actors: RunActors) -> dict[str, Any]:
        """The whole table: held-out estimates with intervals, and a section for each task."""
        table = held_out_table(result, self.config)
        if self.problems:
            table["code"] = self._code(actors)
        if "translation" in self.config.evaluation.tasks:
            table["translation"] = self._translation(result)
        return table

    def _code(self, actors: RunActors) -> dict[str, Any]:
        settings, seed = self.config.evaluation, self.config.seed
        requests = [
            RolloutRequest(reference, settings.code_samples, derive_seed(seed, "code", reference.example_id))
            for reference in self.references
        ]
        rollouts = actors.rollout.generate(requests)
        texts = [[self._text(c.token_ids) for c in rollout.completions[0]] for rollout in rollouts]
        return score_completions(
            self.problems,
            texts,
            settings.code_k,
            limits=_limits(self.config),
            seed=derive_seed(seed, "bootstrap", "code"),
            resamples=settings.bootstrap_resamples,
        )

    def _translation(self, result: EvaluationResult) -> dict[str, Any]:
        """The first completion of each held-out row against its ground truth."""
        settings = self.config.evaluation
        triples = []
        for reference, rollout in zip(self.heldout, result.rollouts, strict=True):
            anchor = int(reference.anchors[0])
            truth = reference.token_ids[anchor : anchor + int(reference.window_lengths[0])]
            source = plain_text(reference.token_ids[:anchor].tolist(), self.tokenizer, ())
            triples.append((source, self._text(rollout.completions[0][0].token_ids), self._text(truth.tolist())))
        _, hypotheses, truths = zip(*triples, strict=True)
        seed = derive_seed(self.config.seed, "bootstrap", "translation")
        table = score_translations(hypotheses, truths, seed=seed, resamples=settings.bootstrap_resamples)
        if settings.comet_model is not None:
            seed = derive_seed(self.config.seed, "bootstrap", "comet")
            table["comet"] = score_comet(
                triples, settings.comet_model, seed=seed, resamples=settings.bootstrap_resamples
            )
        return table

    def _text(self, token_ids: Sequence[int]) -> str:
        return plain_text(token_ids, self.tokenizer, self._stops)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return stop_token_ids(self.tokenizer, self.config.model.path)


class EvaluationRecorder:
    """Keeps the table of every evaluation with the run. A task that fails is reported and never ends the run."""

    def __init__(self, tasks: EvaluationTasks, run_folder: Path, say: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._folder = run_folder / FOLDER
        self._say = say

    def record(self, step: int, result: EvaluationResult, actors: RunActors) -> dict[str, float | None]:
        """Measures the tasks, writes `evaluations/step-N.json` and returns the tasks' values for the metrics."""
        try:
            table = self._tasks.measure(result, actors)
        except ActorError:  # the run's own failure, which it knows how to handle
            raise
        except Exception as error:  # of scoring, whatever a package raises: it must not end a training
            self._say(f"warning: the tasks of the evaluation after step {step} failed: {error!r}")
            table = held_out_table(result, self._tasks.config) | {"failed": repr(error)}
        self._folder.mkdir(exist_ok=True)
        target = self._folder / f"step-{step}.json"
        aside = target.with_suffix(".partial")
        aside.write_text(json.dumps({"step": step, **table}, indent=1, allow_nan=False), encoding="utf-8")
        aside.replace(target)
        failed = {"tasks_failed": 1.0} if "failed" in table else {}
        return dict(_flat(table, ("code", "translation"))) | failed


def held_out_table(result: EvaluationResult, config: EBFTConfig) -> dict[str, Any]:
    """Counts and, for every value of the held-out rows, an estimate with its interval over examples."""
    resamples = config.evaluation.bootstrap_resamples

    def seed(name: str) -> int:
        return derive_seed(config.seed, "bootstrap", name)

    metrics = {}
    for name in result.value_names():
        values = [value for value in result.values(name) if math.isfinite(value)]
        metrics[name] = asdict(bootstrap_mean(values, seed=seed(name), resamples=resamples)) if values else None
    metrics["perplexity"] = _perplexity(result, seed("perplexity"), resamples)
    return {
        "examples": len(result.examples),
        "completions": sum(len(group) for rollout in result.rollouts for group in rollout.completions),
        "weight_version": result.weight_version,
        "metrics": metrics,
        "completion": asdict(result.completions),
    }


def _perplexity(result: EvaluationResult, seed: int, resamples: int) -> dict[str, Any] | None:
    """exp of nats over tokens, all examples together; None where no token counts or a bound is too large to say."""
    weighted = [(example.ce * example.tokens, float(example.tokens)) for example in result.examples if example.tokens]
    if not weighted:
        return None
    nats = bootstrap(weighted, lambda means: means[..., 0] / means[..., 1], seed=seed, resamples=resamples)
    bounds = [nats.value, nats.low, nats.high]
    if max(bound for bound in bounds if bound is not None) >= 700:
        return None
    value, low, high = (None if bound is None else math.exp(bound) for bound in bounds)
    return asdict(replace(nats, value=value, low=low, high=high))


def _limits(config: EBFTConfig) -> SandboxLimits:
    return SandboxLimits(time_s=config.evaluation.code_timeout_s, memory_mib=config.evaluation.code_memory_mib)


def _problem_reference(problem: Problem, tokenizer: PreTrainedTokenizerBase, limit: int) -> Reference:
    """A prompt to complete; it has no ground truth and is never trained on."""
    ids = torch.tensor(tokenizer(problem.prompt)["input_ids"])
    return Reference(
        example_id=problem.task_id,
        token_ids=ids,
        anchors=torch.tensor([len(ids)]),
        window_lengths=torch.tensor([0]),
        max_new_tokens=torch.tensor([limit]),
        loss_mask=torch.zeros(len(ids), dtype=torch.bool),
    )


def _flat(table: dict[str, Any], sections: Sequence[str]) -> Any:
    """`section/name` of every estimate in the sections."""
    for section in sections:
        for name, entry in table.get(section, {}).items():
            if isinstance(entry, dict) and "value" in entry:
                yield f"{section}/{name}", entry["value"]
