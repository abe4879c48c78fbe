"""Held-out evaluation, and the paired comparison of two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf_ebft.actors.cluster import RunActors
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.completion_metrics import CompletionMetrics, completion_metrics
from openrlhf_ebft.core.experience import Completion, Reference, Rollout, RolloutRequest
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.evaluation.ngrams import ngram_overlap
from openrlhf_ebft.trainer.histories import sample_references

EVALUATION_STEP = -1
"""Step number under which the reward aggregator knows an evaluation; training counts from 0."""

COMPARED = ("ce", "alignment", "diversity", "reward", "function", "cfm_unbiased", "cfm")
"""Per-example values of an evaluation, in the order in which they are shown."""


_ROUNDING = 1e-6  # values that are zero by construction, such as similarity after whitening, differ by rounding


MEASURED = (*COMPARED, "reward_best_of_n", "ngram_overlap")
"""All per-example values."""


@dataclass(frozen=True)
class ExampleResult:
    """One held-out example: means over its anchors and completions."""

    example_id: str
    ce: float  # nats per supervised ground-truth token
    alignment: float
    diversity: float
    reward: float
    cfm: float
    cfm_unbiased: float | None
    reward_best_of_n: float | None = None  # mean over anchors of the best completion's reward
    ngram_overlap: float | None = None  # F1 of n-grams with the ground truth, mean over completions
    tokens: int = 0  # supervised ground-truth tokens behind `ce`
    function: float | None = None  # values of reward.function; None without one


@dataclass(frozen=True)
class EvaluationResult:
    """All held-out examples under one version of the policy."""

    examples: tuple[ExampleResult, ...]
    completions: CompletionMetrics
    rollouts: tuple[Rollout, ...]
    weight_version: int

    def save(self, path: Path) -> None:
        """Writes the result as JSON, for the comparison at the end of a resumed run."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> EvaluationResult:
        """Reads what `save` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        rollouts = []
        for rollout in record["rollouts"]:
            groups = tuple(tuple(_completion(c) for c in group) for group in rollout.pop("completions"))
            rollouts.append(Rollout(completions=groups, **rollout))
        return cls(
            examples=tuple(ExampleResult(**example) for example in record["examples"]),
            completions=CompletionMetrics(**record["completions"]),
            rollouts=tuple(rollouts),
            weight_version=record["weight_version"],
        )

    def metrics(self) -> dict[str, float | None]:
        """Means over examples (None where no example has the value), and the shape of the completions."""
        present = {name: self.values(name) for name in MEASURED}
        if not present["function"]:
            del present["function"]
        means = {name: _mean(values) if values else None for name, values in present.items()}
        means["perplexity"] = self.perplexity()
        return means | {f"completion/{name}": value for name, value in asdict(self.completions).items()}

    def perplexity(self) -> float | None:
        """Of all supervised tokens together; None where none is known or the number is too large."""
        tokens = sum(example.tokens for example in self.examples)
        nats = math.fsum(example.ce * example.tokens for example in self.examples if example.tokens)
        return math.exp(nats / tokens) if tokens and nats / tokens < 700 else None

    def value_names(self) -> list[str]:
        """Names of the values that any example has."""
        return [name for name in MEASURED if self.values(name)]

    def values(self, name: str) -> list[float]:
        """One value an example; examples without it (unbiased loss of a single sample) are left out."""
        present = [getattr(example, name) for example in self.examples]
        return [value for value in present if value is not None]


@dataclass(frozen=True)
class PairedChange:
    """Change of one value over the same examples with the same sampling seeds."""

    name: str
    before: float
    after: float
    change: float
    standard_error: float  # of the mean of the per-example differences

    @property
    def reading(self) -> str:
        """`within noise` when the change is smaller than two standard errors."""
        if abs(self.change) <= max(2 * self.standard_error, _ROUNDING):
            return "within noise"
        return "lower" if self.change < 0 else "higher"


def evaluate(actors: RunActors, config: EBFTConfig, references: Sequence[Reference]) -> EvaluationResult:
    """Samples, embeds and scores held-out references; sampling seeds depend on run seed and example alone."""
    requests = [
        RolloutRequest(
            reference=reference,
            num_samples=config.rollout.samples_per_prompt,
            seed=derive_seed(config.seed, "evaluation", reference.example_id),
        )
        for reference in references
    ]
    references, rollouts = sample_references(actors.rollout.generate, requests, config.data.history)
    trees = [RolloutTree.from_rollout(ref, rollout) for ref, rollout in zip(references, rollouts, strict=True)]
    rewards = actors.rewards.rewards(EVALUATION_STEP, trees, phase="evaluation")
    scores = actors.trainer.score(trees)
    examples = []
    for tree, score, rollout in zip(trees, scores, rollouts, strict=True):
        groups = [rewards.groups[(tree.example_id, anchor)] for anchor in range(tree.num_anchors)]
        function = [group.function for group in groups if group.function is not None]
        unbiased = [group.cfm_unbiased for group in groups if group.cfm_unbiased is not None]
        examples.append(
            ExampleResult(
                example_id=tree.example_id,
                ce=score.nats / score.tokens if score.tokens else math.nan,
                alignment=_mean([group.alignment for group in groups]),
                diversity=_mean([group.diversity for group in groups]),
                reward=_mean([group.reward for group in groups]),
                cfm=_mean([group.cfm for group in groups]),
                cfm_unbiased=_mean(unbiased) if unbiased else None,
                reward_best_of_n=_mean(
                    [float(rewards.rewards[(tree.example_id, anchor)].max()) for anchor in range(tree.num_anchors)]
                ),
                ngram_overlap=_overlap(tree.reference, rollout, config.evaluation.ngram_order),
                tokens=score.tokens,
                function=_mean(function) if function else None,
            )
        )
    shape = completion_metrics(references, rollouts)
    return EvaluationResult(tuple(examples), shape, tuple(rollouts), rollouts[0].weight_version)


def compare(before: EvaluationResult, after: EvaluationResult) -> list[PairedChange]:
    """Paired changes of all values. Raises ValueError when the evaluations hold different examples."""
    ids = [[example.example_id for example in result.examples] for result in (before, after)]
    if ids[0] != ids[1]:
        raise ValueError("the evaluations hold different examples and cannot be paired")
    changes = []
    for name in COMPARED:
        first, second = before.values(name), after.values(name)
        if not first or len(first) != len(second):
            continue
        differences = [b - a for a, b in zip(first, second, strict=True)]
        changes.append(
            PairedChange(name, _mean(first), _mean(second), _mean(differences), _standard_error(differences))
        )
    return changes


def _overlap(reference: Reference, rollout: Rollout, order: int) -> float:
    """Mean over all completions of the overlap with their anchor's ground truth."""
    overlaps = []
    for anchor, window, group in zip(reference.anchors, reference.window_lengths, rollout.completions, strict=True):
        truth = reference.token_ids[int(anchor) : int(anchor + window)].tolist()
        overlaps += [ngram_overlap(completion.token_ids, truth, order) for completion in group]
    return _mean(overlaps)


def _completion(record: dict[str, Any]) -> Completion:
    return Completion(tuple(record["token_ids"]), tuple(record["logprobs"]), record["finish_reason"])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; infinite for a single value, whose spread nothing tells."""
    if len(values) < 2:
        return math.inf
    mean = _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
