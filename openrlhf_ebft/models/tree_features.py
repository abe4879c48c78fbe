"""From rollout trees to the inner products of each group's embeddings, through the frozen feature network."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from openrlhf_ebft.config.sections import FeatureConfig
from openrlhf_ebft.core.attention import AttentionMode
from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.group_grid import GroupGrid
from openrlhf_ebft.core.pooling import normalize_tokens, pool_rows, poolable_mask
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.tree_batch import TreeBatch, batches_by_tokens
from openrlhf_ebft.models.feature_network import FeatureNetwork
from openrlhf_ebft.models.split_attention import IMPLEMENTATION, require_split_attention
from openrlhf_ebft.models.tree_forward import attention_spec, forward_tree, require_tree_attention, set_flex_attention

ROW_METHODS = ("mean_pooling", "concat")
"""Pooling methods that look at the whole row, context included."""


class TreeFeatures:
    """Embeds completions and ground truths of trees; a bidirectional network reads every one as a row of its own."""

    def __init__(
        self, network: FeatureNetwork, config: FeatureConfig, *, special_ids: Collection[int], mode: AttentionMode
    ) -> None:
        """`special_ids` are the tokens that do not enter pooling unless `config.pool_special_tokens` is set."""
        if config.embed_method is None:
            raise ValueError("features.embed_method is null: a whole run's configuration fills it in by data.mode")
        self.network = network
        self.config = config
        self.embed_method: str = config.embed_method
        self.special_ids = frozenset() if config.pool_special_tokens else frozenset(special_ids)
        backbone = network.backbone
        self.device, self.dtype = backbone.device, backbone.dtype
        # In a tree, tokens of other branches would see each other through a bidirectional network.
        self.mode: AttentionMode = mode if network.is_causal else "rows"
        self.spec = None
        if self.mode == "split":
            require_split_attention(backbone)
            backbone.set_attn_implementation(IMPLEMENTATION)
        elif self.mode != "rows":
            require_tree_attention(backbone)
            if self.mode == "flex":
                set_flex_attention(backbone)
            self.spec = attention_spec(network.config, backbone.config._attn_implementation)

    @torch.no_grad()
    def group_grams(self, trees: Sequence[RolloutTree]) -> list[Tensor]:
        """Inner products of the pooled embeddings: one (A, n+1, n+1) float64 CPU tensor a tree, ground truth last.

        Where the network's states are not finite, neither are the products: the reward aggregator names such groups.

        Raises ValueError naming the example whose ground-truth window is empty.
        """
        for tree in trees:
            if self.mode == "rows" and tree.reference.document_ids is not None:
                raise ValueError(f"{tree.example_id}: features of packed documents need tree attention, not rows")
            if int(tree.reference.window_lengths.min()) < 1:
                raise ValueError(f"{tree.example_id}: an anchor without ground-truth tokens has no features to match")
        grams: list[Tensor] = [torch.empty(0)] * len(trees)
        for numbers in batches_by_tokens([len(tree) for tree in trees], self.config.max_tokens_per_batch):
            chosen = [trees[i].to(self.device) for i in numbers]
            states = self._tree_states(chosen)
            for number, tree, state in zip(numbers, chosen, states, strict=True):
                grams[number] = self._gram(tree, state)
        return grams

    def _tree_states(self, trees: Sequence[RolloutTree]) -> list[Tensor | None]:
        """Features of each tree's tokens (T, D), or None where rows are run instead."""
        if self.mode == "rows":
            return [None] * len(trees)
        batch = TreeBatch.collate(trees).to(self.device)
        hidden = forward_tree(self.network, batch, self.mode, self.spec, self.dtype)
        return [hidden[row, : len(tree)] for row, tree in enumerate(trees)]

    def _gram(self, tree: RolloutTree, states: Tensor | None) -> Tensor:
        with_context = states is None or self.embed_method in ROW_METHODS
        grid = GroupGrid.of(tree, with_context=with_context)
        anchors, rows = grid.indices.shape[:2]
        tokens = tree.token_ids[grid.indices]
        features = states[grid.indices] if states is not None else self._row_states(tokens, grid)
        features = normalize_tokens(features.float(), self.network.num_taps, self.config.normalize)
        own = pooled = poolable_mask(tokens.flatten(0, 1), grid.completion.flatten(0, 1), self.special_ids)
        mask = own
        if self.embed_method in ROW_METHODS:
            mask = own | (grid.valid & ~grid.completion).flatten(0, 1)
        features = features.flatten(0, 1)
        if self.embed_method == "concat_tokens":
            features, mask = _window_states(features, grid.completion.flatten(0, 1), own)
            own = mask
        embeddings = pool_rows(features, mask, own, self.embed_method).view(anchors, rows, -1)
        # A bidirectional network sees what stands behind the last pooled token, too.
        seen = pooled.view_as(tokens) if self.network.is_causal else grid.completion
        first = _first_equal(tokens.masked_fill(~grid.completion, -1), seen)
        embeddings = embeddings.gather(1, first[..., None].expand_as(embeddings))
        return group_gram(embeddings[:, :-1], embeddings[:, -1]).cpu()

    def _row_states(self, tokens: Tensor, grid: GroupGrid) -> Tensor:
        """Features of rows (A, n+1, L, D), each run alone with a padding mask; zeros or anything at padding."""
        flat, valid = tokens.flatten(0, 1), grid.valid.flatten(0, 1)
        lengths = valid.sum(-1)
        wholes = [torch.arange(len(flat), device=flat.device)]
        if not self.network.ignores_padding:
            wholes = [torch.nonzero(lengths == length)[:, 0] for length in lengths.unique()]
        states = torch.zeros(*flat.shape, self.network.num_taps * self.network.hidden_size, device=flat.device)
        for whole in wholes:
            width = int(lengths[whole].max())
            for numbers in batches_by_tokens([width] * len(whole), self.config.max_tokens_per_batch):
                rows = whole[numbers]
                positions = torch.arange(width, device=flat.device).expand(len(rows), width)
                states[rows, :width] = self.network(flat[rows, :width], valid[rows, :width].long(), positions).float()
        return states.view(*tokens.shape, -1)


def _first_equal(tokens: Tensor, seen: Tensor) -> Tensor:
    """The first row of its group that each row equals up to the last token that its embedding depends on: (A, R) int64.

    Kernels add up in another order wherever a row lies, and whitening blows such rounding up to full size: without one
    embedding for all of them, equal completions would get different rewards, and count as diverse.

    Args:
        tokens: (A, R, L) int64, -1 at context and padding.
        seen: (A, R, L) bool, tokens that an embedding depends on; so it does on all before them.
    """
    upto_last = seen.flip(-1).cumsum(-1).flip(-1) > 0
    numbers = []
    for group in tokens.masked_fill(~upto_last, -1).tolist():
        known: dict[tuple[int, ...], int] = {}
        numbers.append([known.setdefault(tuple(row), number) for number, row in enumerate(group)])
    return torch.tensor(numbers, device=tokens.device)


def _window_states(features: Tensor, completion: Tensor, poolable: Tensor) -> tuple[Tensor, Tensor]:
    """Windows of one length: a completion that ended early, and tokens that are not pooled, have zeros there.

    Args:
        features: (N, L, D) of rows that may begin with their context.
        completion: (N, L) bool, tokens of the completion or ground truth.
        poolable: (N, L) bool, those of them that enter pooling.

    Returns:
        (N, G, D) for the longest of the windows, and an all-true mask (N, G).
    """
    width = int(completion.sum(-1).max())
    order = completion.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
    kept = poolable.gather(1, order)[..., None]
    states = features.gather(1, order[..., None].expand(-1, -1, features.shape[-1])).masked_fill(~kept, 0.0)
    return states, torch.ones_like(order, dtype=torch.bool)
