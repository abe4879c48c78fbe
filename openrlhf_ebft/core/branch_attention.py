"""Attention of many short branches over shared reference keys and each branch's own keys, block by block.

Both kinds of keys go through one softmax. The probabilities of a block exist while the block is worked on and are
computed again in the backward pass, so memory does not grow with queries times keys; those of small batches are kept.

Shape letters: b trees, S reference tokens, R branches, L query tokens of a branch, K key tokens of a branch,
M = R * L queries, H heads, V key/value heads, g = H / V heads that share keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Scores that exist at one time: on a CPU what its cache holds, elsewhere what a small part of the memory holds.
_CPU_SCORES = 2**19
_DEVICE_SCORES = 2**27
# Probabilities of a call that are kept for the backward pass, about as much as a layer's other activations.
_KEPT_SCORES = 2**22
_ALIGNED = 32  # keys of a block are a multiple of this: products of odd sizes take twice as long


@dataclass(frozen=True)
class ScoreRule:
    """How a layer turns products of queries and keys into scores."""

    scaling: float
    window: int | None  # sliding window in tokens; None: full attention
    softcap: float | None  # cap by tanh (Gemma 2), or None


@dataclass(frozen=True, eq=False)
class BranchBias:
    """What is added to the scores of branch tokens: 0 where a key may be seen, -inf elsewhere."""

    reference: Tensor  # (b or 1, R, L or 1, S)
    own: Tensor  # (b or 1, R or 1, L, K)
    reach: list[list[int]]  # (b or 1, R): no token of the branch sees a reference key from this one on
    open: list[list[int]]  # (b or 1, R): every token of the branch sees all reference keys before this one

    @classmethod
    def of(cls, reference: Tensor, own: Tensor, dtype: torch.dtype) -> BranchBias:
        """From the masks of `BranchPlaces.allowed`, bool of the same shapes."""
        trees, branches, _, size = reference.shape
        reach, open_keys = [[size] * branches] * trees, [[0] * branches] * trees
        if reference.device.type == "cpu":  # elsewhere the numbers would have to be waited for
            order = torch.arange(1, size + 1)
            reach = (reference.any(2) * order).amax(-1).clamp(min=1).tolist()
            open_keys = reference.all(2).cumprod(-1).sum(-1).tolist()
        return cls(_additive(reference, dtype), _additive(own, dtype), reach, open_keys)


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
        output = _token_by_token(query)
        rows = _scaled(query, rule)
        blocks = list(_Block.cut(query, key, own_key, bias, rule))
        is_small = rule.softcap is None and sum(block.num_scores for block in blocks) <= _KEPT_SCORES
        is_kept = is_small and any(ctx.needs_input_grad)
        space, kept = _space_for(blocks, query), []
        for block in blocks:
            weights = block.weights(block.queries(rows), torch.empty_like(space) if is_kept else space)
            mixed = torch.bmm(weights, block.shared(value))
            if block.num_own:
                mixed += torch.bmm(block.on_own(weights), block.own(own_value)).view_as(mixed)
            output[block.trees, :, block.branches] = block.as_queries(mixed, query)
            kept += [weights] if is_kept else []
        ctx.save_for_backward(query, key, value, own_key, own_value, *kept)
        ctx.bias, ctx.rule = bias, rule
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, *kept = ctx.saved_tensors
        for_query = _token_by_token(query)
        # Blocks add up: in float32 at least, since there may be many of them.
        total = torch.promote_types(key.dtype, torch.float32)
        for_key, for_value = (torch.zeros(part.mT.shape, dtype=total, device=part.device) for part in (key, value))
        for_own_key, for_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        scaled, gradient = _scaled(query, ctx.rule), gradient.contiguous()
        blocks = list(_Block.cut(query, key, own_key, ctx.bias, ctx.rule))
        spaces = [_space_for(blocks, query) for _ in range(2)]
        for number, block in enumerate(blocks):
            rows, pulls = block.queries(scaled), block.queries(gradient)
            weights = kept[number] if kept else block.weights(rows, spaces[0])
            on_weights = block.products(pulls, block.shared(value), own_value, spaces[1])
            on_scores = torch.ops.aten._softmax_backward_data(on_weights, weights, -1, weights.dtype)
            if ctx.rule.softcap is not None:
                products = block.products(rows, block.shared(key), own_key, spaces[1])
                on_scores *= 1 - torch.tanh(products / ctx.rule.softcap).square()
            block.add_shared(for_value, torch.bmm(pulls.mT, weights))
            block.add_shared(for_key, torch.bmm(rows.mT, on_scores))
            for_rows = torch.bmm(on_scores, block.shared(key))
            if block.num_own:
                pull, score = block.by_branch(pulls), block.on_own(on_scores)
                block.put_own(for_own_value, torch.bmm(block.on_own(weights).mT, pull))
                block.put_own(for_own_key, torch.bmm(score.mT, block.by_branch(rows)))
                for_rows += torch.bmm(score, block.own(own_key)).view_as(for_rows)
            for_query[block.trees, :, block.branches] = block.as_queries(for_rows * ctx.rule.scaling, query)
        shared = (part.mT.to(key.dtype) for part in (for_key, for_value))
        return for_query, *shared, for_own_key, for_own_value, None, None


def _scaled(query: Tensor, rule: ScoreRule) -> Tensor:
    """Queries (b, V, R, g, L, d) times the rule's factor, contiguous."""
    return torch.mul(query, rule.scaling, out=query.new_empty(query.shape))


def _token_by_token(query: Tensor) -> Tensor:
    """Room for (b, V, R, g, L, d), laid out as (b, R, L, V, g, d): a layer reads the heads of a token together."""
    trees, kv_heads, branches, shared, steps, size = query.shape
    return query.new_empty(trees, branches, steps, kv_heads, shared, size).permute(0, 3, 1, 4, 2, 5)


def _space_for(blocks: list[_Block], query: Tensor) -> Tensor:
    """Room for the scores of the largest block, used by all: fresh memory would cost about as much as the scores."""
    return query.new_empty(max((block.num_scores for block in blocks), default=0))


@dataclass(frozen=True, eq=False)
class _Block:
    """Some branches of some trees (t and n of them): their parts as batches of matrices.

    The queries of a block are (t * V, n * g * L, d): seen from the reference keys rows of one matrix, seen from the
    own keys n matrices, without a copy in between.
    """

    trees: slice
    branches: slice
    reach: int  # reference keys that some branch of the block sees; the others are left out
    open: int  # reference keys that all of the block see, from the first one on
    shape: torch.Size  # of all queries: (b, V, R, g, L, d)
    key: Tensor  # (b, V, S, d)
    own_key: Tensor  # (b, V, R, K, d)
    bias: BranchBias
    rule: ScoreRule

    @classmethod
    def cut(cls, query: Tensor, key: Tensor, own_key: Tensor, bias: BranchBias, rule: ScoreRule) -> Iterator[_Block]:
        """Blocks that cover everything: several whole trees, or a part of one tree's branches."""
        trees, kv_heads, branches, shared, steps, _ = query.shape
        limit = _CPU_SCORES if query.device.type == "cpu" else _DEVICE_SCORES
        of_branch = max(kv_heads * shared * steps * (key.shape[2] + own_key.shape[3]), 1)
        at_once = max(1, limit // of_branch)
        num_trees = max(1, at_once // max(branches, 1))
        num_branches = -(-branches // -(-branches // at_once)) if branches else 1  # about equal parts
        for tree in range(0, trees, num_trees):
            for branch in range(0, branches, num_branches):
                rows = slice(tree, min(tree + num_trees, trees))
                columns = slice(branch, min(branch + num_branches, branches))
                of_trees = rows if len(bias.reach) > 1 else slice(None)
                seen = max(max(of_tree[columns]) for of_tree in bias.reach[of_trees]) + own_key.shape[3]
                reach = min(-(-seen // _ALIGNED) * _ALIGNED - own_key.shape[3], key.shape[2])
                open_keys = min(min(of_tree[columns]) for of_tree in bias.open[of_trees])
                yield cls(rows, columns, reach, open_keys, query.shape, key, own_key, bias, rule)

    @property
    def num_branches(self) -> int:
        """n."""
        return self.branches.stop - self.branches.start

    @property
    def num_own(self) -> int:
        """K."""
        return self.own_key.shape[3]

    @property
    def num_scores(self) -> int:
        """t * V * n * g * L * (reach + K)."""
        _, kv_heads, _, shared, steps, _ = self.shape
        queries = (self.trees.stop - self.trees.start) * kv_heads * self.num_branches * shared * steps
        return queries * (self.reach + self.num_own)

    def queries(self, states: Tensor) -> Tensor:
        """(b, V, R, g, L, d) -> (t * V, n * g * L, d) of the block, contiguous: every product would copy it."""
        return states[self.trees, :, self.branches].flatten(2, 4).flatten(0, 1).contiguous()

    def as_queries(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `queries`, with the sizes of `like`: (t, V, n, g, L, d)."""
        return rows.view(-1, like.shape[1], self.num_branches, *like.shape[3:])

    def shared(self, states: Tensor) -> Tensor:
        """(b, V, S, d) -> (t * V, reach + K, d).

        The places of the own keys hold zeros, so that a product with scores or weights of all keys leaves them out.
        """
        part = states[self.trees, :, : self.reach]
        return nn.functional.pad(part, (0, 0, 0, self.num_own)).flatten(0, 1)

    def add_shared(self, states: Tensor, block: Tensor) -> None:
        """Adds (t * V, d, reach + K) to (b, V, d, S), without the places of the own keys."""
        target = states[self.trees, :, :, : self.reach]
        target += block[..., : self.reach].view(target.shape)

    def own(self, states: Tensor) -> Tensor:
        """(b, V, R, K, d) -> (t * V * n, K, d)."""
        return states[self.trees, :, self.branches].flatten(0, 2)

    def put_own(self, states: Tensor, block: Tensor) -> None:
        """The inverse of `own`: writes the block into `states`."""
        target = states[self.trees, :, self.branches]
        target.copy_(block.view(target.shape))

    def by_branch(self, rows: Tensor) -> Tensor:
        """(t * V, n * g * L, x) -> (t * V * n, g * L, x)."""
        return rows.reshape(rows.shape[0] * self.num_branches, -1, rows.shape[2])

    def on_own(self, rows: Tensor) -> Tensor:
        """The own keys' part of (t * V, n * g * L, reach + K): (t * V * n, g * L, K)."""
        return self.by_branch(rows[..., self.reach :])

    def products(self, rows: Tensor, shared: Tensor, own: Tensor, space: Tensor) -> Tensor:
        """Rows times `shared` of the reference and own (b, V, R, K, d), transposed, written into `space`.

        All operands are contiguous: others would be copied, or multiplied by a slower kernel.

        Returns:
            (t * V, n * g * L, reach + K), a view of `space`.
        """
        products = space[: self.num_scores].view(*rows.shape[:2], -1)
        torch.bmm(rows, shared.mT, out=products)
        if self.num_own:
            on_own = products[..., self.reach :]
            on_own.copy_(torch.bmm(self.by_branch(rows), self.own(own).mT).view(on_own.shape))
        return products

    def weights(self, rows: Tensor, space: Tensor) -> Tensor:
        """Probabilities (t * V, n * g * L, reach + K) of scaled queries (t * V, n * g * L, d), in `space`."""
        scores = self.products(rows, self.shared(self.key), self.own_key, space)
        if self.rule.softcap is not None:
            scores.div_(self.rule.softcap).tanh_().mul_(self.rule.softcap)
        self._add_bias(scores[..., self.open : self.reach], self.bias.reference[..., self.open : self.reach])
        if self.num_own:
            self._add_bias(scores[..., self.reach :], self.bias.own)
        return torch.softmax(scores, dim=-1, out=scores if scores.device.type == "cpu" else None)

    def _add_bias(self, scores: Tensor, bias: Tensor) -> None:
        """Adds the block's part of bias (b or 1, R or 1, L or 1, x) to scores (t * V, n * g * L, x)."""
        trees = self.trees if len(bias) > 1 else slice(None)
        own = bias[trees, self.branches if bias.shape[1] > 1 else slice(None)]
        steps, kv_heads = self.bias.own.shape[2], self.key.shape[1]
        view = scores.unflatten(1, (self.num_branches, -1, steps)).unflatten(0, (-1, kv_heads))
        view += own[:, None, :, None]
