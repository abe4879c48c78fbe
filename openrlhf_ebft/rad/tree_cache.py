"""Keys and values of a reward model for one prefix per row plus the step's candidates.

The slots of a layer's buffer are, from the left: committed prefix entries, then the tokens of the running forward.
Nothing is ever cropped: a forward writes at a slot index that the owner sets, and whatever lies beyond the committed
slots is overwritten by the next forward (library versions disagree about cropping a cache to zero or below).
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# Attention sees a whole number of such blocks: matrix libraries compile a kernel for every new shape, and a step that
# is one token longer than the last would pay for that in every layer.
SLOT_BLOCK = 32
# Free slots added when a buffer must grow, so that growing is rare.
SLOT_RESERVE = 64


def visible_slots(used: int) -> int:
    """Slots that attention sees when `used` are in use; those beyond hold zeros or old entries and must be masked."""
    return -(-used // SLOT_BLOCK) * SLOT_BLOCK


class TreeCacheLayer(CacheLayerMixin):
    """One layer's buffer: keys and values [B, heads, slots, head_dim], written from slot `start` on."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.start = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take device, dtype and head shapes from the first states."""
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.size(3))
        self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.size(3))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the forward's states after the committed slots; returns the visible slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.start + key_states.size(2)
        visible = visible_slots(end)
        if visible > self.keys.size(2):
            self.keys = _grown(self.keys, self.start, visible + SLOT_RESERVE)
            self.values = _grown(self.values, self.start, visible + SLOT_RESERVE)
        self.keys[:, :, self.start : end] = key_states
        self.values[:, :, self.start : end] = value_states
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return visible_slots(self.start + query_length), 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return -1

    def copy_slot(self, rows: torch.Tensor, source: torch.Tensor, target: int) -> None:
        """Copy slot `source[b]` of row b to slot `target`, all rows."""
        self.keys[:, :, target] = self.keys[rows, :, source]
        self.values[:, :, target] = self.values[rows, :, source]

    def take(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Replace the buffer: new row i holds the slots `slots[i]` [B', W] of old row `rows[i]`."""
        width = slots.size(1)
        self.keys = _grown(self.keys[rows[:, None], :, slots].transpose(1, 2), width, width + SLOT_RESERVE)
        self.values = _grown(self.values[rows[:, None], :, slots].transpose(1, 2), width, width + SLOT_RESERVE)


class TreeCache(Cache):
    """A transformers cache whose layers are :class:`TreeCacheLayer`; all write from the same slot."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[TreeCacheLayer() for _ in range(num_layers)])

    def set_start(self, start: int) -> None:
        """Commit the first `start` slots: the next forward writes after them."""
        for layer in self.layers:
            layer.start = start

    def copy_slot(self, source: torch.Tensor, target: int) -> None:
        """Copy slot `source[b]` of each row b to slot `target`, in every layer that was used."""
        rows = torch.arange(source.size(0), device=source.device)
        for layer in self.layers:
            if layer.is_initialized:
                layer.copy_slot(rows, source, target)

    def take(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Reorder, drop or repeat rows and pick slots: rows [B'], slots [B', W], both int64."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.take(rows, slots)


def _grown(buffer: torch.Tensor, used: int, slots: int) -> torch.Tensor:
    """A buffer of `slots` slots that starts with the `used` first slots of `buffer`; zeros after them."""
    new = buffer.new_zeros(*buffer.shape[:2], slots, buffer.size(3))
    new[:, :, :used] = buffer[:, :, :used]
    return new
