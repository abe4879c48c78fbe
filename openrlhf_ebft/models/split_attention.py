"""Split attention inside transformers models: one attention implementation that asks a layout what to do.

The layout travels as the keyword argument `tree_layout` through the model's forward pass, so a checkpointed layer
finds it again when it is recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from openrlhf_ebft.core.branch_attention import BranchBias, ScoreRule, attend_branches
from openrlhf_ebft.core.split_attention import BranchPlaces, TreeSplit

IMPLEMENTATION = "ebft_split"
"""Name under which transformers knows split attention."""

# On a CPU the kernel behind scaled_dot_product_attention is faster only with more tokens than these.
_MOST_BLOCK_TOKENS = 2048

LayerStates = tuple[Tensor, Tensor, Tensor]
"""query (b, H, T, d), key and value (b, V, T, d) of one layer."""


@runtime_checkable
class TreeLayout(Protocol):
    """Computes the attention of one layer."""

    def attend(self, layer: int, states: LayerStates, rule: ScoreRule) -> Tensor:
        """query (b, H, T, d), key and value (b, V, T, d) -> (b, H, T, d)."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_layout: TreeLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention layers call; returns (b, T, H, d) and no weights."""
    name = type(module).__name__
    if tree_layout is None:
        raise RuntimeError(f"{name}: split attention was called without a tree; set model.attention to sdpa or rows")
    if dropout:
        raise RuntimeError(f"{name}: split attention has no dropout, but {dropout} is asked for")
    unknown = [key for key in ("s_aux", "position_bias", "head_mask") if others.get(key) is not None]
    if unknown:
        raise RuntimeError(f"{name}: split attention does not know {', '.join(unknown)}; set model.attention to rows")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output = tree_layout.attend(layer, (query, key, value), ScoreRule(factor, sliding_window, softcap))
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attention)


def takes_split_attention(model: PreTrainedModel) -> bool:
    """Whether every layer of the model attends through transformers' attention interface, with known layer types."""
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or [])
    is_known = types <= {"full_attention", "sliding_attention"}
    attends_alone = bool(model._supports_attention_backend) and not model._is_stateful  # no recurrent layers beside
    return attends_alone and is_known and not getattr(config, "alibi", False)


def require_split_attention(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose attention cannot be split."""
    if not takes_split_attention(model):
        raise ValueError(
            f"model type {model.config.model_type!r} does not take split attention; set model.attention to sdpa or rows"
        )


@contextmanager
def split_attention(model: PreTrainedModel) -> Iterator[None]:
    """Runs the model's attention split inside the `with` block; every forward pass there needs a `tree_layout`."""
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class ReferenceAttention:
    """Attention among reference tokens, with its masks made once."""

    def __init__(self, places: BranchPlaces) -> None:
        self._places = places
        self._masks: dict[int | None, Tensor | None] = {}
        self._biases: dict[tuple[int | None, torch.dtype], BranchBias] = {}

    def __call__(self, states: LayerStates, rule: ScoreRule) -> Tensor:
        """query (b, H, S, d), key and value (b, V, S, d) -> (b, H, S, d)."""
        query, key, value = states
        if rule.softcap is not None or (query.device.type == "cpu" and query.shape[2] <= _MOST_BLOCK_TOKENS):
            return attend_branches(query, (key, value), None, self._bias(rule.window, query.dtype), rule)
        mask = self._mask(rule.window)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=rule.scaling, enable_gqa=True
        )

    def _mask(self, window: int | None) -> Tensor | None:
        if window not in self._masks:
            self._masks[window] = self._places.reference_allowed(window)
        return self._masks[window]

    def _bias(self, window: int | None, dtype: torch.dtype) -> BranchBias:
        """Every reference token as a branch of one token that has no key of its own."""
        if (window, dtype) not in self._biases:
            mask = self._mask(window)
            if mask is None:
                count, device = self._places.positions.shape[1] - 1, self._places.positions.device
                mask = torch.ones(1, 1, count, count, dtype=torch.bool, device=device).tril()
            nothing = mask.new_ones(1, 1, 1, 0)
            self._biases[window, dtype] = BranchBias.of(mask.transpose(1, 2), nothing, dtype)
        return self._biases[window, dtype]


class BatchLayout:
    """Attention over a whole batch of trees in one forward pass."""

    def __init__(self, split: TreeSplit) -> None:
        self._split = split
        self._reference = ReferenceAttention(split.places)
        self._biases: dict[tuple[int | None, torch.dtype], BranchBias] = {}

    def attend(self, layer: int, states: LayerStates, rule: ScoreRule) -> Tensor:
        """See `TreeLayout`."""
        (query, key, value), (own_query, own_key, own_value) = zip(
            *(self._split.divide(part) for part in states), strict=True
        )
        on_reference = self._reference((query, key, value), rule)
        if own_query.shape[2] == 0:
            return self._split.join(on_reference, own_query)
        bias = self._bias(rule.window, query.dtype)
        steps = self._split.num_steps
        own = own_key.unflatten(2, (-1, steps)), own_value.unflatten(2, (-1, steps))
        branches = attend_branches(own_query, (key, value), own, bias, rule)
        return self._split.join(on_reference, branches)

    def _bias(self, window: int | None, dtype: torch.dtype) -> BranchBias:
        if (window, dtype) not in self._biases:
            steps = torch.arange(self._split.num_steps, device=self._split.reference.device)
            masks = self._split.places.allowed(steps, self._split.num_steps, window)
            self._biases[window, dtype] = BranchBias.of(*masks, dtype)
        return self._biases[window, dtype]
