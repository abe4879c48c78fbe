"""Preallocated keys and values of a reward model, in blocks, and what one forward pass does with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from openrlhf_ebft.rad.engine.blocks import BLOCK
from openrlhf_ebft.rad.reward_model_value import backbone_of


@dataclass(frozen=True)
class LayerShape:
    """Key heads and widths of one attention layer."""

    heads: int
    key_width: int
    value_width: int


def layer_shapes(reward_model: torch.nn.Module) -> list[LayerShape]:
    """The shapes of every layer's keys and values, from a forward of one token.

    Raises:
        ValueError: a layer keeps something else than one key and value per token.
    """
    device = next(reward_model.parameters()).device
    cache = DynamicCache()
    with torch.inference_mode():
        backbone_of(reward_model)(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), past_key_values=cache, use_cache=True
        )
    shapes = []
    for number, layer in enumerate(cache.layers):
        keys, values = layer.keys, layer.values
        if keys is None or keys.dim() != 4 or keys.size(2) != 1 or values.shape[:3] != keys.shape[:3]:
            raise ValueError(f"layer {number} keeps no key and value per token")
        shapes.append(LayerShape(keys.size(1), keys.size(3), values.size(3)))
    return shapes


class PagedCache:
    """Buffers [blocks, heads, BLOCK, width] of every layer's keys and values.

    Token j of a prefix with blocks b lies in block b[j // BLOCK] at place j % BLOCK.
    """

    def __init__(self, shapes: list[LayerShape], blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        def buffers(widths: list[int]) -> list[torch.Tensor]:
            return [
                torch.zeros(blocks, shape.heads, BLOCK, width, dtype=dtype, device=device)
                for shape, width in zip(shapes, widths, strict=True)
            ]

        self.keys = buffers([shape.key_width for shape in shapes])
        self.values = buffers([shape.value_width for shape in shapes])
        self.bytes = sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def write(self, layer: int, slots: Slots, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [heads, P, width] of P tokens."""
        self.keys[layer][slots.blocks, :, slots.places] = keys.transpose(0, 1)
        self.values[layer][slots.blocks, :, slots.places] = values.transpose(0, 1)


@dataclass(frozen=True)
class Slots:
    """Where P tokens lie: block numbers [P] and places [P] in the blocks, int64."""

    blocks: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, pairs: list[tuple[int, int]], device: torch.device) -> Slots:
        both = torch.tensor(pairs, dtype=torch.long).view(-1, 2).to(device)
        return cls(both[:, 0], both[:, 1])


@dataclass(frozen=True)
class Segment:
    """New prefix tokens of one request in a forward.

    Attributes:
        start, count: their place among the forward's tokens.
        position: of the first one in the prefix.
        table: [nb] int64, the blocks of the prefix up to their end.
    """

    start: int
    count: int
    position: int
    table: torch.Tensor


@dataclass(frozen=True)
class CandidateGroup:
    """Candidates of R requests with at most K candidates each, whose attention is computed together.

    Attributes:
        start, size: place of the first among the forward's tokens, and their number; row by row.
        rows, k: R and K.
        table: [R, nb] int64, blocks of every prefix, padded with block 0; nb * BLOCK exceeds every length.
        lengths: [R] int64, tokens of every prefix.
        padded: [R * K] int64, for every candidate of K in every row its place in the group, any place where a row has
            fewer; None when all rows have K.
        kept: [size] int64, the places in `padded` that are real; None like `padded`.
    """

    start: int
    size: int
    rows: int
    k: int
    table: torch.Tensor
    lengths: torch.Tensor
    padded: torch.Tensor | None
    kept: torch.Tensor | None


@dataclass
class Forward:
    """One forward of a reward model over new prefix tokens (first) and candidates (after them).

    Attributes:
        cache: the prefix entries.
        slots: where the new tokens' entries go; None without new tokens.
        new_tokens: their number P.
        token_ids, positions: those of the new tokens.
        segments, groups: what the tokens are.
        windowed: whether layers have sliding windows at all.
        candidates: per layer, keys and values [heads, N, width] of the N candidates, filled by the forward.
        layer: the layer that is running.
        windows_seen: values of `sliding_window` that the layers asked for.
        shared: what all layers with the same shape compute once, such as gather indices and masks.
    """

    cache: PagedCache
    slots: Slots | None
    new_tokens: int
    token_ids: list[int]
    positions: list[int]
    segments: list[Segment]
    groups: list[CandidateGroup]
    windowed: bool = False
    candidates: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    layer: int = 0
    windows_seen: set[int | None] = field(default_factory=set)
    shared: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def as_transformers_cache(self) -> Cache:
        """The object to pass as `past_key_values`."""
        return Cache(layers=[_ForwardLayer(self, number) for number in range(len(self.cache.keys))])


class _ForwardLayer(CacheLayerMixin):
    """Stores a layer's new entries; attention reads the stored prefixes itself."""

    is_sliding = False

    def __init__(self, forward: Forward, number: int) -> None:
        super().__init__()
        self._forward = forward
        self._number = number
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes [1, heads, T, width] of the forward's tokens and returns them as they are."""
        forward, new = self._forward, self._forward.new_tokens
        forward.layer = self._number
        if forward.slots is not None:
            forward.cache.write(self._number, forward.slots, key_states[0, :, :new], value_states[0, :, :new])
        forward.candidates.append((key_states[0, :, new:], value_states[0, :, new:]))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
