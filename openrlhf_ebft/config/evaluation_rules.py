"""Rules between the keys of the evaluation section and others."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ebft.config.multiples import nearest_multiples
from openrlhf_ebft.config.sections import EBFTConfig


def evaluation_has_rows(config: EBFTConfig) -> Iterator[str]:
    """Held-out rows must exist where they are asked for."""
    evaluation, fraction = config.evaluation, config.data.heldout_fraction
    if fraction == 0 and evaluation.max_examples > 0:
        yield (
            f"evaluation.max_examples = {evaluation.max_examples} needs held-out rows, but data.heldout_fraction = 0: "
            "set data.heldout_fraction above 0 (0.05), or evaluation.max_examples to 0"
        )
    if evaluation.max_examples == 0 and evaluation.every_steps > 0:
        yield (
            f"evaluation.every_steps = {evaluation.every_steps} with evaluation.max_examples = 0 evaluates nothing: "
            "set evaluation.max_examples to 1 or more, or evaluation.every_steps to 0"
        )
    if evaluation.max_examples == 0 and evaluation.tasks:
        yield (
            f"evaluation.tasks = {list(evaluation.tasks)} is measured with the held-out evaluation, but "
            "evaluation.max_examples = 0: set evaluation.max_examples to 1 or more"
        )


def evaluations_meet_weight_updates(config: EBFTConfig) -> Iterator[str]:
    """An evaluation takes the newest weights, so between two updates it would change what training samples later."""
    every, sync = config.evaluation.every_steps, config.rollout.sync_every_steps
    if config.policy.objective == "ebft" and every % sync:
        nearest = " or ".join(str(value) for value in nearest_multiples(every, sync))
        yield (
            f"evaluation.every_steps = {every} is no multiple of rollout.sync_every_steps = {sync}: evaluations would "
            f"give the engines newer weights than training has them use; set evaluation.every_steps to {nearest}, "
            "or rollout.sync_every_steps to 1"
        )


def code_is_allowed_to_run(config: EBFTConfig) -> Iterator[str]:
    """Generated code runs only when the user says so, and pass@k needs k samples."""
    evaluation = config.evaluation
    if "code" not in evaluation.tasks:
        return
    if not evaluation.execute_code:
        yield (
            "evaluation.tasks = [code] runs programs that the model wrote, but evaluation.execute_code = false: set "
            "evaluation.execute_code to true if this machine may run them, or leave code out of evaluation.tasks"
        )
    largest = max(evaluation.code_k)
    if min(evaluation.code_k) < 1 or largest > evaluation.code_samples:
        yield (
            f"evaluation.code_k = {list(evaluation.code_k)} needs values from 1 to evaluation.code_samples = "
            f"{evaluation.code_samples}: set evaluation.code_samples to {max(largest, 1)} or more, or lower "
            "evaluation.code_k"
        )


def translation_has_text(config: EBFTConfig) -> Iterator[str]:
    """Translations are whole completions of a prompt."""
    evaluation = config.evaluation
    if "translation" in evaluation.tasks and config.data.mode == "strided":
        yield (
            "evaluation.tasks = [translation] compares whole completions with their ground truths, but data.mode = "
            "strided samples short windows: set data.mode to structured, or leave translation out of evaluation.tasks"
        )
    if evaluation.comet_model is not None and "translation" not in evaluation.tasks:
        yield (
            f"evaluation.comet_model = {evaluation.comet_model} is used only by task translation: add it to "
            "evaluation.tasks, or leave evaluation.comet_model out"
        )


EVALUATION_RULES = (evaluation_has_rows, evaluations_meet_weight_updates, code_is_allowed_to_run, translation_has_text)
