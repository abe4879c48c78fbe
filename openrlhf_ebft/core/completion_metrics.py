"""What a step's completions look like apart from their rewards: lengths, stops, repeats.

A policy that learns to stop at once, or never, can have a splendid reward; these numbers show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf_ebft.core.experience import Reference, Rollout

HEALTHY_LENGTH_RATIO = (0.5, 2.0)
"""Mean completion length over mean ground-truth length: outside of this a run is likely to have collapsed."""


@dataclass(frozen=True)
class CompletionMetrics:
    """Means over all completions of a step."""

    length: float  # tokens, a stop token included
    length_ratio: float  # mean length over the mean length of the ground truths
    stopped_share: float  # ended with a stop token
    truncated_share: float  # cut off by the token limit
    duplicate_share: float  # equal to an earlier completion of its group
    cached_token_share: float  # context tokens that came from the engine's prefix cache


def completion_metrics(references: Sequence[Reference], rollouts: Sequence[Rollout]) -> CompletionMetrics:
    """Metrics of rollouts in the order of their references. Raises ValueError when there is no completion."""
    groups = [group for rollout in rollouts for group in rollout.completions]
    completions = [completion for group in groups for completion in group]
    if not completions:
        raise ValueError("no completion to measure")
    count = len(completions)
    lengths = sum(len(completion.token_ids) for completion in completions)
    truths = sum(
        int(reference.window_lengths.sum()) * len(rollout.completions[0])
        for reference, rollout in zip(references, rollouts, strict=True)
    )
    stopped = sum(completion.finish_reason == "stop" for completion in completions)
    repeats = sum(len(group) - len({completion.token_ids for completion in group}) for group in groups)
    context = sum(int(reference.anchors.sum()) for reference in references)
    return CompletionMetrics(
        length=lengths / count,
        length_ratio=lengths / truths if truths else 0.0,
        stopped_share=stopped / count,
        truncated_share=1.0 - stopped / count,
        duplicate_share=repeats / count,
        cached_token_share=sum(rollout.cached_tokens for rollout in rollouts) / context,
    )


def length_warning(metrics: CompletionMetrics) -> str | None:
    """A sentence when the length ratio leaves the healthy range, else None."""
    low, high = HEALTHY_LENGTH_RATIO
    if low <= metrics.length_ratio <= high:
        return None
    return (
        f"completions are {metrics.length_ratio:.2f} times as long as the ground truths (healthy: {low} to {high}): "
        "rewards and feature matching mean little at such lengths; see policy.sft_warmup_steps"
    )
