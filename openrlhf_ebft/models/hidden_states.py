"""Reads hidden states of chosen depths, running no block above the deepest one and no language-model head.

Depths count as transformers' `output_hidden_states` does: 0 is the embedding output, l the output of block l, and the
last one is taken after the final norm. Shape letters: B rows, S tokens, H hidden size, L blocks, K tapped depths.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class _DeepestReached(Exception):
    """Ends a forward pass from inside it once every tapped state is read."""


def unwrap_model(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Returns (the transformers model, the peft wrapper or None) from under torch.compile, DeepSpeed, DDP and peft."""
    adapted = None
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module) or isinstance(
            inner := getattr(model, "module", None), nn.Module
        ):
            model = inner
        elif hasattr(model, "get_base_model"):
            adapted, model = model, model.get_base_model()
        else:
            return model, adapted


def backbone_of(model: nn.Module) -> nn.Module:
    """The transformers model without its head; a bare backbone is returned as it is."""
    inner, _ = unwrap_model(model)
    if not hasattr(inner, "base_model_prefix") or not hasattr(inner, "config"):
        raise ValueError(f"expected a transformers model, bare or wrapped, got {type(inner).__name__}")
    return inner.base_model


def num_blocks(backbone: nn.Module) -> int:
    """Number of transformer blocks, from the model's config."""
    return int(backbone.config.get_text_config().num_hidden_layers)


def find_blocks(backbone: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Finds the list of ``num_layers`` blocks: (its path in the backbone, the list).

    Raises ValueError unless exactly one outermost module list has that length.
    """
    lists = {
        name: part
        for name, part in backbone.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == num_layers
    }
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outermost) != 1:
        raise ValueError(
            f"{type(backbone).__name__} must hold exactly one list of its {num_layers} blocks, found {outermost}"
        )
    return outermost[0], lists[outermost[0]]


class HiddenStateTap:
    """Runs a backbone up to the deepest tapped block and returns the tapped hidden states side by side."""

    def __init__(self, model: nn.Module, layer_indices: Sequence[int], *, num_layers: int | None = None) -> None:
        """
        Args:
            model: a transformers model, bare, with a head, or wrapped.
            layer_indices: depths in 0..L, in the order of the output; repeats are allowed.
            num_layers: L of the whole model if ``model`` holds only its first blocks; the final norm belongs to depth
                L alone. Default: the blocks that ``model`` holds.
        Raises:
            ValueError: no depth, or one outside 0..L or above the blocks that are there.
        """
        self.backbone = backbone_of(model)
        held = num_blocks(self.backbone)
        self.num_layers = held if num_layers is None else num_layers
        self.layer_indices = [int(index) for index in layer_indices]
        if not self.layer_indices:
            raise ValueError(f"layer_indices is empty: name at least one depth in 0..{self.num_layers}")
        for index in self.layer_indices:
            if not 0 <= index <= self.num_layers:
                raise ValueError(f"layer index {index} is outside 0..{self.num_layers}")
        self.deepest = max(self.layer_indices)
        if self.deepest > held:
            raise ValueError(f"layer index {self.deepest} needs {self.deepest} blocks, the model holds {held}")
        self.blocks = find_blocks(self.backbone, held)[1]
        accepted = inspect.signature(self.backbone.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        # A key/value cache or recorded states would make memory grow with depth.
        switches = ("use_cache", "output_hidden_states", "output_attentions")
        self._off = {name: False for name in switches if takes_any or name in accepted}

    def __call__(self, **inputs: Any) -> Tensor:
        """Tapped states (B, S, K*H), in the model's dtype, for keyword arguments of the backbone's own forward.

        ``attention_mask`` may have any form that the backbone understands: (B, S), 4 axes, or a dict of masks.
        """
        collected = _Collected(self.layer_indices)
        with self._hooks(collected):
            try:
                outputs = self.backbone(**inputs, **self._off)
                if self.deepest == self.num_layers:
                    collected.write(self.deepest, outputs[0])
            except _DeepestReached:
                pass  # how a forward pass that is complete for us ends
        return collected.result()

    @contextmanager
    def _hooks(self, collected: _Collected) -> Iterator[None]:
        stop = self.deepest if self.deepest < self.num_layers else None

        def take(index: int, state: Tensor) -> None:
            collected.write(index, state)
            if index == stop:
                raise _DeepestReached

        handles = []
        try:
            for index in set(self.layer_indices) - {self.num_layers}:
                if index == 0:
                    hook = lambda _, args, kwargs: take(0, args[0] if args else kwargs["hidden_states"])  # noqa: E731
                    handles.append(self.blocks[0].register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
                else:
                    hook = lambda _, args, out, at=index: take(at, out if isinstance(out, Tensor) else out[0])  # noqa: E731
                    handles.append(self.blocks[index - 1].register_forward_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Collected:
    """One output buffer; states are copied into it at once, so that no block's output outlives the block."""

    def __init__(self, layer_indices: list[int]) -> None:
        self._slots = layer_indices
        self._missing = set(layer_indices)
        self._buffer: Tensor | None = None

    def write(self, index: int, state: Tensor) -> None:
        size = state.shape[-1]
        if self._buffer is None:
            self._buffer = state.new_empty(*state.shape[:-1], size * len(self._slots))
        elif self._buffer.shape[-1] != size * len(self._slots):
            others = self._buffer.shape[-1] // len(self._slots)
            raise ValueError(f"depth {index} has {size} features, the depths below it {others}: tap it alone")
        for slot, wanted in enumerate(self._slots):
            if wanted == index:
                self._buffer[..., slot * size : (slot + 1) * size] = state.detach()
        self._missing.discard(index)

    def result(self) -> Tensor:
        if self._buffer is None or self._missing:
            raise RuntimeError(f"the forward pass ended without reaching depths {sorted(self._missing)}")
        return self._buffer


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switches every module to eval mode and back to the mode that each one had."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _check_inputs(input_ids: Tensor, attention_mask: Tensor | None, batch_size: int | None) -> None:
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be (B, S) with B, S >= 1, got {tuple(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask must be {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


@torch.no_grad()
def extract_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    layer_indices: Sequence[int],
    batch_size: int | None = None,
    *,
    position_ids: Tensor | None = None,
    adapters: bool = True,
) -> Tensor:
    """Hidden states of the chosen depths, concatenated; equal to transformers' `output_hidden_states`.

    Args:
        model: transformers model, bare, with a head, or wrapped by peft, DeepSpeed, DDP or torch.compile.
        input_ids: (B, S) token ids on the model's device.
        attention_mask: (B, S) of 0 and 1, padding on either side; None: no padding.
        layer_indices: depths in 0..L (0: embeddings, L: after the final norm), in the order of the output.
        batch_size: rows of one forward pass; None: all at once.
        position_ids: (B, S); None: what the model does by itself.
        adapters: False switches peft adapters off for this call.
    Returns:
        (B, S, len(layer_indices)*H) in the model's dtype, without a graph. Train or eval modes and hooks are as before,
        also after an error.
    Raises:
        ValueError: shapes that do not fit, a depth outside 0..L, a batch_size below 1, no transformers model.
    """
    _check_inputs(input_ids, attention_mask, batch_size)
    if position_ids is not None and position_ids.shape != input_ids.shape:
        raise ValueError(f"position_ids must be {tuple(input_ids.shape)}, got {tuple(position_ids.shape)}")
    tap = HiddenStateTap(model, layer_indices)
    inner, adapted = unwrap_model(model)
    rows = len(input_ids)
    step = rows if batch_size is None else batch_size
    states: Tensor | None = None
    with evaluation_mode(inner), nullcontext() if adapters or adapted is None else adapted.disable_adapter():
        for start in range(0, rows, step):
            part = slice(start, start + step)
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            chunk = tap(**{name: value[part] for name, value in inputs.items() if value is not None})
            if step >= rows:
                return chunk
            if states is None:
                states = chunk.new_empty(rows, *chunk.shape[1:])
            states[part] = chunk
    assert states is not None
    return states
