"""How well a prefix reward model predicts held-out labels, by prefix length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from openrlhf_ebft.rad.reward_examples import RewardExamples
from openrlhf_ebft.rad.reward_loss import prefix_rewards

PREFIX_LENGTHS = (1, 2, 4, 8, 16, 32, 64)
ROWS_PER_FORWARD = 64


@dataclass(frozen=True)
class PrefixError:
    """Held-out errors of the predictions after a prefix.

    Attributes:
        length: tokens of the prefix, or None for whole texts.
        examples: texts that are at least that long.
        mse: mean squared error of the prediction.
        baseline_mse: the same for always predicting the mean label of these examples.
        spearman: rank correlation of prediction and label; NaN when one of them is constant or examples < 2.
    """

    length: int | None
    examples: int
    mse: float
    baseline_mse: float
    spearman: float


@torch.inference_mode()
def prefix_errors(
    model: PreTrainedModel, examples: RewardExamples, lengths: Sequence[int] = PREFIX_LENGTHS
) -> list[PrefixError]:
    """Errors at each prefix length that some text reaches, then for whole texts.

    Args:
        model: prefix reward model; put into eval mode.
        examples: held-out examples.
        lengths: prefix lengths in tokens.
    """
    model.eval()
    device = next(model.parameters()).device
    rewards: list[torch.Tensor] = []
    for start in range(0, len(examples), ROWS_PER_FORWARD):
        batch = examples.collate(range(start, min(start + ROWS_PER_FORWARD, len(examples))), device)
        predicted = prefix_rewards(model, batch.input_ids, batch.attention_mask).float().cpu()
        rewards += [row[: int(count)] for row, count in zip(predicted, batch.attention_mask.sum(dim=1), strict=True)]
    errors = []
    for length in (*lengths, None):
        chosen = [index for index, row in enumerate(rewards) if length is None or len(row) >= length]
        if chosen:
            at = -1 if length is None else length - 1
            predictions = torch.stack([rewards[index][at] for index in chosen])
            errors.append(_error(length, predictions, examples.labels[chosen]))
    return errors


def _error(length: int | None, predictions: torch.Tensor, labels: torch.Tensor) -> PrefixError:
    return PrefixError(
        length=length,
        examples=len(labels),
        mse=float(((predictions - labels) ** 2).mean()),
        baseline_mse=float(((labels - labels.mean()) ** 2).mean()),
        spearman=spearman(predictions, labels),
    )


def spearman(first: torch.Tensor, second: torch.Tensor) -> float:
    """Spearman's rank correlation of two [N] tensors; ties share their mean rank; NaN if one is constant."""
    ranks = [_ranks(values.double()) for values in (first, second)]
    centred = [rank - rank.mean() for rank in ranks]
    scale = float(centred[0].norm() * centred[1].norm())
    return float((centred[0] * centred[1]).sum()) / scale if scale > 0 else float("nan")


def _ranks(values: torch.Tensor) -> torch.Tensor:
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(dim=0).double()
    return (ends - (counts.double() - 1) / 2)[inverse]


def markdown_table(errors: Sequence[PrefixError]) -> str:
    """The errors as a Markdown table."""
    lines = [
        "| prefix (tokens) | texts | mean squared error | error of the mean label | Spearman |",
        "|---|---|---|---|---|",
    ]
    for error in errors:
        name = "whole text" if error.length is None else str(error.length)
        lines.append(
            f"| {name} | {error.examples} | {error.mse:.4f} | {error.baseline_mse:.4f} | {error.spearman:.3f} |"
        )
    return "\n".join(lines) + "\n"


def plot_errors(errors: Sequence[PrefixError], path: str | Path) -> None:
    """Write a picture of error and correlation against prefix length (needs matplotlib)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = ["all" if error.length is None else str(error.length) for error in errors]
    left.plot(names, [error.mse for error in errors], marker="o", label="reward model")
    left.plot(names, [error.baseline_mse for error in errors], linestyle="--", color="grey", label="mean label")
    left.set(xlabel="prefix length (tokens)", ylabel="held-out mean squared error", ylim=(0, None))
    left.legend(frameon=False)
    right.plot(names, [error.spearman for error in errors], marker="o")
    right.set(xlabel="prefix length (tokens)", ylabel="held-out Spearman correlation", ylim=(-0.1, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
