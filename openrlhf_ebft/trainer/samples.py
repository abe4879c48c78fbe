"""Held-out completions as text, before and after training."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.trainer.evaluation import EvaluationResult

_PROMPT_LINES = 4


def sample_pairs(
    tokenizer: PreTrainedTokenizerBase,
    references: Sequence[Reference],
    before: EvaluationResult,
    after: EvaluationResult,
    count: int,
) -> list[str]:
    """The first completion of the first `count` references under both policies, as blocks of text."""
    blocks = []
    for reference, first, second in zip(references, before.rollouts, after.rollouts, strict=True):
        if len(blocks) == count:
            break
        anchor = int(reference.anchors[0])
        truth = reference.token_ids[anchor : anchor + int(reference.window_lengths[0])].tolist()
        parts = {
            "prompt (end)": _tail(tokenizer.decode(reference.token_ids[:anchor].tolist())),
            "ground truth": tokenizer.decode(truth),
            "before": tokenizer.decode(first.completions[0][0].token_ids),
            "after": tokenizer.decode(second.completions[0][0].token_ids),
        }
        lines = [f"--- {title}\n{text.rstrip()}" for title, text in parts.items()]
        blocks.append(f"\n=== held-out example {reference.example_id}\n" + "\n".join(lines))
    return blocks


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_PROMPT_LINES:])
