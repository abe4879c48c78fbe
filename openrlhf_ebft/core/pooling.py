"""From the hidden states of tokens to one embedding per row or window (algorithms.md section 4).

Shape letters: B rows (or windows), S tokens of a row, D size of a token's feature vector. Everywhere "valid" counts
tokens whose mask is 1, wherever the padding lies; an index into the row is never taken from the mask's sum.
"""

from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import Tensor

from openrlhf_ebft.core.gram import require_floating, unit_rows

TokenNormalization = Literal["joint", "per_layer", "none"]


def _widen(hidden: Tensor) -> Tensor:
    return hidden if hidden.dtype == torch.float64 else hidden.float()


def _states_at_rank(hidden: Tensor, mask: Tensor, rank: Tensor) -> Tensor:
    """States of the valid token number ``rank`` (B,), counted from 0, of every row: (B, D)."""
    chosen = mask & (mask.cumsum(-1) == rank.unsqueeze(-1) + 1)
    index = chosen.int().argmax(-1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]


def _masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: a padded position may hold NaN or inf.
    total = torch.where(mask.unsqueeze(-1), _widen(hidden), 0.0).sum(1)
    return (total / mask.sum(-1, keepdim=True)).to(hidden.dtype)


def _last_token(hidden: Tensor, mask: Tensor, completion: Tensor) -> Tensor:
    return _states_at_rank(hidden, mask, mask.sum(-1) - 1)


def _mean_pooling(hidden: Tensor, mask: Tensor, completion: Tensor) -> Tensor:
    return _masked_mean(hidden, mask)


def _completion_mean(hidden: Tensor, mask: Tensor, completion: Tensor) -> Tensor:
    return _masked_mean(hidden, completion)


def _concat(hidden: Tensor, mask: Tensor, completion: Tensor) -> Tensor:
    count = mask.sum(-1)
    return torch.cat([_states_at_rank(hidden, mask, quarter * count // 4) for quarter in (1, 2, 3)], dim=-1)


def _concat_tokens(hidden: Tensor, mask: Tensor, completion: Tensor) -> Tensor:
    if not mask.all():
        raise ValueError(
            f"concat_tokens needs windows of one fixed length: every row must have {mask.shape[1]} valid tokens, "
            f"the shortest has {int(mask.sum(-1).min())}"
        )
    return hidden.flatten(1)


POOLING_METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "last_token": _last_token,
    "mean_pooling": _mean_pooling,
    "completion_mean": _completion_mean,
    "concat": _concat,
    "concat_tokens": _concat_tokens,
}


@torch.no_grad()
def pool_rows(hidden: Tensor, mask: Tensor, completion_mask: Tensor, method: str) -> Tensor:
    """Pool every row to one embedding; the one implementation behind rows, windows and `apply_embed_method`.

    Args:
        hidden: (B, S, D) token features, any floating dtype. A row is a whole sequence (needed by `mean_pooling` and
            `concat`, which see the prompt too) or a window alone.
        mask: (B, S) bool, tokens that count.
        completion_mask: (B, S) bool, tokens of the completion; only its overlap with ``mask`` counts. For windows
            pass ``mask`` again.
        method: a key of `POOLING_METHODS`.
    Returns:
        (B, D), or (B, 3D) for `concat`, or (B, S*D) for `concat_tokens`; dtype of ``hidden``, means in float32 or
        better, without a graph.
    Raises:
        ValueError: unknown method, shapes that do not fit, a row (named) without a token to pool.
    """
    if method not in POOLING_METHODS:
        raise ValueError(f"unknown pooling method {method!r}, known: {', '.join(POOLING_METHODS)}")
    require_floating("hidden", hidden)
    if hidden.ndim != 3 or mask.shape != hidden.shape[:2] or completion_mask.shape != hidden.shape[:2]:
        raise ValueError(
            f"need hidden (B, S, D) and masks (B, S), got {tuple(hidden.shape)}, mask {tuple(mask.shape)} and "
            f"completion_mask {tuple(completion_mask.shape)}"
        )
    completion = mask & completion_mask
    needed, what = (completion, "completion token") if method == "completion_mean" else (mask, "valid token")
    empty = (~needed.any(-1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"{method} needs at least 1 {what} in every row, 0 in rows {empty[:10]} of {len(mask)}")
    return POOLING_METHODS[method](hidden.detach(), mask, completion)


def _valid_mask(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    if hidden_states.ndim != 3:
        raise ValueError(f"hidden_states must be (B, S, D), got {tuple(hidden_states.shape)}")
    shape = hidden_states.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=hidden_states.device)
    if attention_mask.shape != shape:
        raise ValueError(f"attention_mask must be {tuple(shape)}, got {tuple(attention_mask.shape)}")
    mask = attention_mask == 1
    if not (mask | (attention_mask == 0)).all():
        raise ValueError("attention_mask must hold only 0 (padding) and 1 (valid)")
    return mask


def _after_prompt(mask: Tensor, prompt_lengths: Tensor) -> Tensor:
    if prompt_lengths.shape != mask.shape[:1]:
        raise ValueError(f"prompt_lengths must be ({len(mask)},), got {tuple(prompt_lengths.shape)}")
    valid = mask.sum(-1)
    for row in ((prompt_lengths < 0) | (prompt_lengths > valid)).nonzero().flatten().tolist():
        raise ValueError(
            f"prompt_lengths[{row}] = {int(prompt_lengths[row])}, but row {row} has {int(valid[row])} tokens"
        )
    return mask & (mask.cumsum(-1) > prompt_lengths.unsqueeze(-1))


def apply_embed_method(
    hidden_states: Tensor,
    method: str,
    attention_mask: Tensor | None = None,
    prompt_lengths: Tensor | None = None,
) -> Tensor:
    """Pool the hidden states of every row to one embedding.

    Args:
        hidden_states: (B, S, D), any floating dtype.
        method: "last_token", "mean_pooling", "completion_mean" or "concat"; also "concat_tokens".
        attention_mask: (B, S) of 0 and 1, padding on either side; None: every token is valid.
        prompt_lengths: (B,) number of valid tokens of each row's prompt; needed by "completion_mean".
    Returns:
        (B, D), or (B, 3D) for "concat", in the dtype of ``hidden_states``, without a graph.
    Raises:
        ValueError: unknown method, shapes that do not fit, a missing or too large prompt length, a row without a
            valid token or, for "completion_mean", without a completion token.
    """
    if method == "completion_mean" and prompt_lengths is None:
        raise ValueError("completion_mean needs prompt_lengths (B,), got None")
    mask = _valid_mask(hidden_states, attention_mask)
    completion = mask
    if prompt_lengths is not None:
        completion = _after_prompt(mask, prompt_lengths.to(mask.device))
    return pool_rows(hidden_states, mask, completion, method)


@torch.no_grad()
def normalize_tokens(states: Tensor, num_layers: int, mode: TokenNormalization) -> Tensor:
    """Scale every token's feature vector before pooling.

    Args:
        states: (..., num_layers*H), the tapped layers concatenated.
        num_layers: number of tapped layers.
        mode: "joint" (unit length of the whole vector; the authors' `concat`), "per_layer" (unit length of each
            layer's part; the authors' `stack`) or "none".
    Returns:
        Same shape and dtype; zero vectors stay zero.
    Raises:
        ValueError: unknown mode, or a size that num_layers does not divide.
    """
    if num_layers < 1 or states.shape[-1] % num_layers:
        raise ValueError(f"feature size {states.shape[-1]} is not a multiple of num_layers = {num_layers}")
    if mode == "none":
        return states.detach()
    if mode == "joint":
        return unit_rows(states).to(states.dtype)
    if mode == "per_layer":
        return unit_rows(states.unflatten(-1, (num_layers, -1))).flatten(-2).to(states.dtype)
    raise ValueError(f'token normalization must be "joint", "per_layer" or "none", got {mode!r}')


def poolable_mask(token_ids: Tensor, valid_mask: Tensor, special_ids: Collection[int]) -> Tensor:
    """Tokens of completions that may enter pooling: valid and not special.

    With EOS pooled by `last_token` every completion's end looks like every other's, and the policy learns to stop at
    once. A completion of special tokens only (EOS at once) keeps them, so that it still has an embedding.

    Args:
        token_ids: (B, L) token ids of completions or windows.
        valid_mask: (B, L) bool, False on padding.
        special_ids: ids of EOS and the other special tokens.
    Returns:
        (B, L) bool.
    """
    if token_ids.shape != valid_mask.shape:
        raise ValueError(f"token_ids {tuple(token_ids.shape)} and valid_mask {tuple(valid_mask.shape)} differ in shape")
    special = torch.isin(token_ids, torch.tensor(sorted(special_ids), dtype=token_ids.dtype, device=token_ids.device))
    content = valid_mask & ~special
    return torch.where(content.any(-1, keepdim=True), content, valid_mask)
