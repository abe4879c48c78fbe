"""Rewards of every prefix of a text, and the loss that trains them (arXiv 2310.09520, section 2.1)."""

from __future__ import annotations

import torch
from torch import nn

from openrlhf_ebft.rad.reward_model_value import backbone_of, position_head


def prefix_rewards(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """sigmoid(score(h_t)) at every position.

    Args:
        model: decoder-only sequence classifier with one output.
        input_ids: [B, T] int64.
        attention_mask: [B, T], 1 at real tokens; padding may be on either side.

    Returns:
        [B, T] in [0, 1], in the dtype of the model's hidden states; values at padding mean nothing.

    Raises:
        ValueError: a model without a head at every position, or with more than one output.
    """
    head = position_head(model)
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no score head that reads every position; use a decoder-only model"
        )
    if model.config.num_labels != 1:
        raise ValueError(f"a prefix reward model has 1 output, {type(model).__name__} has {model.config.num_labels}")
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if bool((attention_mask[:, :1] == 0).any()):
        # With padding on the left, positions must still start at the first real token.
        inputs["position_ids"] = (attention_mask.long().cumsum(dim=1) - 1).clamp_min(0)
    hidden = backbone_of(model)(**inputs, use_cache=False).last_hidden_state
    return torch.sigmoid(head(hidden).squeeze(-1))


def prefix_reward_losses(
    predictions: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each sequence: sum_t t * (r_t - label)^2 / (l (l + 1) / 2), real positions counted 1..l.

    Args:
        predictions: [B, T], any float dtype; computed in float32.
        labels: [B] in [0, 1].
        attention_mask: [B, T], 1 at real positions.

    Returns:
        losses [B] float32, 0 for empty rows; and [B] bool, True for rows with at least one position.
    """
    real = attention_mask != 0
    counted = (real.long().cumsum(dim=1) * real).float()
    # Predictions at padding may be anything, NaN included; replaced before the square, they reach neither the sum nor
    # its gradient.
    kept = torch.where(real, predictions.float(), torch.zeros_like(predictions, dtype=torch.float32))
    errors = (kept - labels.float()[:, None]) ** 2
    length = real.sum(dim=1)
    weight = (length * (length + 1) / 2).clamp_min(1)
    return (counted * errors).sum(dim=1) / weight, length > 0


def prefix_reward_loss(predictions: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Mean of :func:`prefix_reward_losses` over the non-empty rows; 0 with a gradient path when all are empty.

    Args and dtypes: as there.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if predictions.shape != attention_mask.shape or labels.shape != predictions.shape[:1]:
        raise ValueError(
            f"predictions {tuple(predictions.shape)}, labels {tuple(labels.shape)} and attention_mask "
            f"{tuple(attention_mask.shape)} must be [B, T], [B] and [B, T]"
        )
    losses, filled = prefix_reward_losses(predictions, labels, attention_mask)
    return losses.sum() / filled.sum().clamp_min(1)
