"""Held-out completions as text, before and after training."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.core.turns import first_turn
from openrlhf_ebft.trainer.evaluation import EvaluationResult

_PROMPT_LINES = 4


def sample_pairs(
    tokenizer: PreTrainedTokenizerBase,
    references: Sequence[Reference],
    before: EvaluationResult,
    after: EvaluationResult,
    count: int,
) -> list[dict[str, str]]:
    """The first completion of the first `count` references under both policies.

    Each sample has `example_id`, `prompt` (its end), `ground_truth`, `before` and `after`.
    """
    samples = []
    # On the policy's own history a chat has a rollout for each turn; its first stands behind the data's prompt.
    chosen = {name: reference for reference in references for name in (reference.example_id, first_turn(reference))}
    pairs = [pair for pair in zip(before.rollouts, after.rollouts, strict=True) if pair[0].example_id in chosen]
    for first, second in pairs[:count]:
        reference = chosen[first.example_id]
        anchor = int(reference.anchors[0])
        truth = reference.token_ids[anchor : anchor + int(reference.window_lengths[0])].tolist()
        samples.append(
            {
                "example_id": reference.example_id,
                "prompt": _tail(tokenizer.decode(reference.token_ids[:anchor].tolist())),
                "ground_truth": tokenizer.decode(truth),
                "before": tokenizer.decode(first.completions[0][0].token_ids),
                "after": tokenizer.decode(second.completions[0][0].token_ids),
            }
        )
    return samples


def sample_text(sample: dict[str, str]) -> str:
    """A sample as a block of lines for the terminal."""
    titles = {"prompt": "prompt (end)", "ground_truth": "ground truth", "before": "before", "after": "after"}
    lines = [f"--- {title}\n{sample[name].rstrip()}" for name, title in titles.items()]
    return f"\n=== held-out example {sample['example_id']}\n" + "\n".join(lines)


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_PROMPT_LINES:])
