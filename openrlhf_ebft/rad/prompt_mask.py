"""The attention mask of a growing prefix, from the prompt's mask, for rows in any order."""

from __future__ import annotations

from typing import Any

import torch


class PromptMask:
    """Extends the prompt's attention mask over the generated tokens.

    A prefix row takes the mask of the prompt row it begins with, so beams, repeated rows and dropped rows keep the
    right one; generated tokens are real tokens, the padding behind an early end included (as in `generate()`).
    A row that begins with none of the prompts (another prompt, or no mask given) is read as `generate()` reads it:
    leading pad tokens are padding if the pad token is not also an end token, otherwise everything is real.

    Args:
        prompt_ids: [P_rows, P] int64 or None; without it, rows are matched by number.
        attention_mask: [P_rows, P], 1 at real tokens, or None.
        pad_token_id: the language model's pad token or None.
        eos_token_id: its end token or None.

    Raises:
        ValueError: ids and mask of different shapes.
    """

    def __init__(
        self,
        prompt_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        pad_token_id: int | None,
        eos_token_id: int | None,
    ) -> None:
        if prompt_ids is not None and attention_mask is not None and prompt_ids.shape != attention_mask.shape:
            raise ValueError(
                f"prompt_ids {tuple(prompt_ids.shape)} and attention_mask {tuple(attention_mask.shape)} "
                "must have the same shape"
            )
        self.prompt_ids = prompt_ids
        self.attention_mask = attention_mask
        self.pad_token_id = pad_token_id if pad_token_id != eos_token_id else None

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Any, prompt_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> PromptMask:
        """With the tokenizer's pad and end tokens; without a tokenizer there is no padding but the mask's."""
        pad, end = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        return cls(prompt_ids, attention_mask, pad, end)

    def for_prefix(self, prefix_ids: torch.Tensor) -> torch.Tensor:
        """Mask [B, T] int64 of `prefix_ids` [B, T]."""
        mask = self._from_tokens(prefix_ids)
        if self.attention_mask is None or self.attention_mask.size(0) == 0:
            return mask
        stored = self.attention_mask.to(prefix_ids.device).long()
        rows, known = self._prompt_rows(prefix_ids, stored.size(0))
        width = min(stored.size(1), prefix_ids.size(1))
        extended = torch.ones_like(mask)
        extended[:, :width] = stored[rows, :width]
        return torch.where(known[:, None], extended, mask)

    def _prompt_rows(self, prefix_ids: torch.Tensor, prompts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompt row of each prefix row and whether there is one: [B] int64, [B] bool."""
        batch = prefix_ids.size(0)
        device = prefix_ids.device
        # generate() repeats each prompt row in place, so row i of n copies belongs to prompt i // n.
        ordered = torch.arange(batch, device=device) // max(batch // prompts, 1)
        aligned = batch % prompts == 0
        ordered = ordered.clamp_max(prompts - 1)
        if self.prompt_ids is None:
            return ordered, torch.full((batch,), aligned, dtype=torch.bool, device=device)
        prompt_ids = self.prompt_ids.to(device)
        width = min(prompt_ids.size(1), prefix_ids.size(1))
        begins = (prefix_ids[:, None, :width] == prompt_ids[None, :, :width]).all(dim=-1)
        first = begins.long().argmax(dim=1)
        own = begins.gather(1, ordered[:, None])[:, 0] & aligned
        return torch.where(own, ordered, first), begins.any(dim=1)

    def _from_tokens(self, prefix_ids: torch.Tensor) -> torch.Tensor:
        if self.pad_token_id is None:
            return torch.ones_like(prefix_ids)
        return ((prefix_ids != self.pad_token_id).long().cumsum(dim=1) > 0).long()
