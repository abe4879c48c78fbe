"""Log-probabilities of a given text under a language model and a logits processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.inference_mode()
def continuation_logprobs(
    model: Any,
    input_ids: torch.Tensor,
    continuation_ids: torch.Tensor,
    *,
    processor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probability of each continuation token, the text being forced.

    Args:
        model: causal language model.
        input_ids: [B, P] int64 prompts, P >= 1.
        continuation_ids: [B, C] int64, or [C] for all rows.
        processor: maps (prefix [B, T], logits [B, V] float32) to shifted logits; None leaves them.
        attention_mask: [B, P], 1 at real prompt tokens; None = all real.

    Returns:
        [B, C] float32; -inf where the processor excludes the token.

    Raises:
        ValueError: shapes that do not belong together, or an empty prompt.
    """
    if continuation_ids.dim() == 1:
        continuation_ids = continuation_ids[None].expand(input_ids.size(0), -1)
    if input_ids.dim() != 2 or continuation_ids.size(0) != input_ids.size(0):
        raise ValueError(
            "input_ids must be [B, P] and continuation_ids [B, C] or [C], "
            f"got {tuple(input_ids.shape)} and {tuple(continuation_ids.shape)}"
        )
    if input_ids.size(1) == 0:
        raise ValueError("the prompt is empty: give at least one token (for example BOS)")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} must match input_ids {tuple(input_ids.shape)}")
    ids = torch.cat([input_ids, continuation_ids.to(input_ids.device)], dim=1).to(model.device)
    real = torch.cat([attention_mask.to(ids.device), torch.ones_like(ids[:, input_ids.size(1) :])], dim=1)
    positions = (real.long().cumsum(dim=1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=real, position_ids=positions).logits.float()

    columns: list[torch.Tensor] = []
    # The first token follows the prompt's last real one, wherever its padding is.
    number = torch.arange(input_ids.size(1), device=ids.device)
    last = (number * (real[:, : input_ids.size(1)] != 0)).amax(dim=1)
    for end in range(input_ids.size(1), ids.size(1)):
        scores = logits[:, end - 1] if columns else logits[torch.arange(ids.size(0), device=ids.device), last]
        if processor is not None:
            scores = processor(ids[:, :end], scores)
        columns.append(torch.log_softmax(scores, dim=-1).gather(1, ids[:, end : end + 1]))
    return torch.cat(columns, dim=1) if columns else logits.new_zeros(ids.size(0), 0)
