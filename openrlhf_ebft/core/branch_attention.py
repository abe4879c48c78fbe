"""Attention of many short branches over shared reference keys and each branch's own keys, block by block.

Both kinds of keys go through one softmax. The probabilities of a block exist while the block is worked on and are
computed again in the backward pass, so memory does not grow with queries times keys; those of small batches are kept.

Shape letters: b trees, S reference tokens, R branches, L query tokens of a branch, K key tokens of a branch,
M = R * L queries, H heads, V key/value heads, g = H / V heads that share keys, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from openrlhf_ebft.core.branch_blocks import PADDING, Block, Sizes

# Scores that exist at one time: on a CPU what its cache holds, elsewhere what a small part of the memory holds.
_CPU_SCORES = 2**18
_DEVICE_SCORES = 2**27
# Probabilities of a call that are kept for the backward pass, about as much as a layer's other activations.
_KEPT_SCORES = 2**22


@dataclass(frozen=True)
class ScoreRule:
    """How a layer turns products of queries and keys into scores."""

    scaling: float
    window: int | None  # sliding window in tokens; None: full attention
    softcap: float | None  # cap by tanh (Gemma 2), or None


@dataclass(frozen=True, eq=False)
class BranchBias:
    """What is added to the scores of branch tokens: 0 where a key may be seen, -inf elsewhere."""

    reference: Tensor  # (b or 1, R, L or 1, S and the padding that blocks of keys may need)
    own: Tensor  # (b or 1, R or 1, L, K)
    reach: list[list[int]]  # (b or 1, R): no token of the branch sees a reference key from this one on
    open: list[list[int]]  # (b or 1, R): every token of the branch sees all reference keys before this one
    # The layers of a pass have the same blocks.
    _blocks: dict[Sizes, list[Block]] = field(default_factory=dict)
    _parts: dict[Block, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, reference: Tensor, own: Tensor, dtype: torch.dtype) -> BranchBias:
        """From the masks of `BranchPlaces.allowed`, bool of the same shapes."""
        trees, branches, _, size = reference.shape
        reach, open_keys = [[size] * branches] * trees, [[0] * branches] * trees
        if reference.device.type == "cpu":  # elsewhere the numbers would have to be waited for
            order = torch.arange(1, size + 1)
            reach = (reference.any(2) * order).amax(-1).clamp(min=1).tolist()
            open_keys = reference.all(2).cumprod(-1).sum(-1).tolist()
        padded = nn.functional.pad(reference, (0, PADDING), value=False)
        return cls(_additive(padded, dtype), _additive(own, dtype), reach, open_keys)

    def blocks(self, sizes: Sizes) -> list[Block]:
        """What a call of these sizes is cut into."""
        if sizes not in self._blocks:
            limit = _CPU_SCORES if self.own.device.type == "cpu" else _DEVICE_SCORES
            self._blocks[sizes] = list(sizes.cut(self.reach, self.open, limit))
        return self._blocks[sizes]

    def on_reference(self, block: Block) -> Tensor:
        """The block's part that is not 0 everywhere: (t or 1, 1, n, 1, L or 1, reach - open)."""
        if block not in self._parts:
            trees = block.trees if len(self.reference) > 1 else slice(None)
            part = self.reference[trees, block.branches, :, block.open : block.reach]
            self._parts[block] = part[:, None, :, None]
        return self._parts[block]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def attend_branches(
    query: Tensor,
    reference: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor] | None,
    bias: BranchBias,
    rule: ScoreRule,
) -> Tensor:
    """Attention of branch tokens over reference keys and own keys, one softmax.

    Args:
        query: (b, H, M, d), branch by branch.
        reference: keys and values (b, V, S, d), computed once for all branches.
        own: keys and values (b, V, R, K, d); None: the branches have no keys of their own (K = 0).
        bias: who sees what, which has cut the rule's window already.
        rule: scaling and cap of the scores.

    Returns:
        (b, H, M, d) in the dtype of `query`.
    """
    trees, heads, _, size = query.shape
    kv_heads = reference[0].shape[1]
    branches, steps = len(bias.reach[0]), bias.own.shape[2]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads)).unflatten(3, (branches, steps)).transpose(2, 3)
    if own is None:
        nothing = query.new_empty(trees, kv_heads, branches, 0, size)
        own = nothing, nothing
    output = _BranchAttention.apply(grouped, *reference, *own, bias, rule)
    return output.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)


class _BranchAttention(torch.autograd.Function):
    """query (b, V, R, g, L, d) and keys and values as in `attend_branches` -> (b, V, R, g, L, d)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        bias: BranchBias,
        rule: ScoreRule,
    ) -> Tensor:
        sizes = Sizes.of(query, key, own_key)
        blocks = bias.blocks(sizes)
        scores, values = _Scores(sizes, query, key, own_key, bias, rule), sizes.behind_own(value)
        mixed, own_weights = torch.empty_like(scores.rows), torch.empty_like(scores.on_own)
        is_small = rule.softcap is None and sum(block.num_scores for block in blocks) <= _KEPT_SCORES
        is_kept = is_small and any(ctx.needs_input_grad)
        space, kept = None if is_kept else _space_for(blocks, query), []
        for block in blocks:
            weights = scores.weights(block, query.new_empty(block.num_scores) if space is None else space)
            mixed[block.place] = sizes.mixtures(block, weights, values)
            own_weights[block.place] = weights[..., : sizes.own]
            kept += [weights] if is_kept else []
        if sizes.own:
            mixed += sizes.own_mixtures(own_weights, own_value)
        ctx.save_for_backward(query, key, value, own_key, own_value, *kept)
        ctx.bias, ctx.rule = bias, rule
        return sizes.token_by_token(mixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, *kept = ctx.saved_tensors
        sizes = Sizes.of(query, key, own_key)
        blocks = ctx.bias.blocks(sizes)
        scores, values = _Scores(sizes, query, key, own_key, ctx.bias, ctx.rule), sizes.behind_own(value)
        rows, pulls = scores.rows, sizes.rows(gradient)
        own_pulls = sizes.own_products(pulls, own_value)
        for_rows, own_weights = torch.empty_like(rows), torch.empty_like(own_pulls)
        # Blocks add up: in float32 at least, since there may be many of them.
        total = torch.promote_types(key.dtype, torch.float32)
        for_key, for_value = (torch.zeros_like(values.mT, dtype=total) for _ in range(2))
        spaces = [_space_for(blocks, query) for _ in range(1 if kept else 2)]
        for number, block in enumerate(blocks):
            weights = kept[number] if kept else scores.weights(block, spaces[0])
            on_weights = sizes.products(block, pulls, values, spaces[-1])
            on_weights[..., : sizes.own] = own_pulls[block.place]
            on_scores = torch.ops.aten._softmax_backward_data(on_weights, weights, -1, weights.dtype)
            own_weights[block.place] = weights[..., : sizes.own]
            own_pulls[block.place] = on_scores[..., : sizes.own]
            scores.through_cap(block, on_scores, spaces[-1])
            sizes.add_on_keys(for_value, block, pulls, weights)
            sizes.add_on_keys(for_key, block, rows, on_scores)
            for_rows[block.place] = sizes.mixtures(block, on_scores, scores.keys)
        if sizes.own:
            scores.through_own_cap(own_pulls)
            for_rows += sizes.own_mixtures(own_pulls, own_key)
        shared = (sizes.of_reference(part.mT).to(key.dtype) for part in (for_key, for_value))
        on_own = sizes.on_own(own_pulls, rows), sizes.on_own(own_weights, pulls)
        return sizes.token_by_token(for_rows, ctx.rule.scaling), *shared, *on_own, None, None


def _space_for(blocks: list[Block], query: Tensor) -> Tensor:
    """Room for the scores of the largest block, used by all: fresh memory would cost about as much as the scores."""
    return query.new_empty(max((block.num_scores for block in blocks), default=0))


class _Scores:
    """Scores of a call, block by block, with the operands that all blocks share."""

    def __init__(
        self, sizes: Sizes, query: Tensor, key: Tensor, own_key: Tensor, bias: BranchBias, rule: ScoreRule
    ) -> None:
        self._sizes, self._own_key, self._bias, self._rule = sizes, own_key, bias, rule
        self.rows = sizes.rows(torch.mul(query, rule.scaling, out=query.new_empty(query.shape)))  # (b * V, M, d)
        self.keys = sizes.behind_own(key)  # (b * V, W, d)

    @cached_property
    def on_own(self) -> Tensor:
        """Scores (b * V, M, K) of the own keys; a backward pass with kept probabilities does not need them."""
        sizes = self._sizes
        scores = sizes.own_products(self.rows, self._own_key)
        self._cap(scores)
        view = scores.view(sizes.trees, sizes.kv_heads, sizes.branches, sizes.shared, sizes.steps, sizes.own)
        view += self._bias.own[:, None, :, None]
        return scores

    def weights(self, block: Block, space: Tensor) -> Tensor:
        """Probabilities of the block (`block.shape`), in `space`."""
        sizes = self._sizes
        scores = sizes.products(block, self.rows, self.keys, space)
        self._cap(scores)
        hidden = scores.view(block.grid)[..., sizes.own + block.open :]
        hidden += self._bias.on_reference(block)
        scores[..., : sizes.own] = self.on_own[block.place]
        return torch.softmax(scores, dim=-1, out=scores if scores.device.type == "cpu" else None)

    def through_cap(self, block: Block, on_scores: Tensor, space: Tensor) -> None:
        """Multiplies gradients of the block's capped scores (`block.shape`) with the cap's derivative, in place."""
        if self._rule.softcap is not None:
            self._multiply_slope(on_scores, self._sizes.products(block, self.rows, self.keys, space))

    def through_own_cap(self, on_scores: Tensor) -> None:
        """The same for those of the own keys (b * V, M, K)."""
        if self._rule.softcap is not None:
            self._multiply_slope(on_scores, self._sizes.own_products(self.rows, self._own_key))

    def _cap(self, scores: Tensor) -> None:
        if self._rule.softcap is not None:
            scores.div_(self._rule.softcap).tanh_().mul_(self._rule.softcap)

    def _multiply_slope(self, on_scores: Tensor, products: Tensor) -> None:
        assert self._rule.softcap is not None
        on_scores *= 1 - torch.tanh(products / self._rule.softcap).square()
