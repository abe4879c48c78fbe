"""Packed copies of a model's linear weights, in use while it generates and made again when the weights change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from openrlhf_ebft.core.cpu_linear import MIN_ROWS, PackedLinear, has_onednn_linear, is_packable

# Packing takes about the time that it saves in so many forward passes.
_PASSES_THAT_PAY = 8


class PackedCopies:
    """Copies of the linear weights of a model on an x86 CPU, in the order that oneDNN works in.

    They take as much memory as the weights. A layer is copied once its weight has stayed the same for more forward
    passes than packing costs, so a model whose weights change all the time loses little, and one that generates long
    completions between two changes gains a tenth to a fifth of the products' time. Changes are seen by the version that
    a weight counts, which writing through its `.data` leaves as it is. Results stay the same, bit for bit
    where oneDNN multiplied before.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules()) if has_onednn_linear() else []
        self._places = [
            _Place(parent, name, child)
            for parent in modules
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear)
        ]

    @contextmanager
    def in_use(self, passes: int) -> Iterator[None]:
        """Puts the copies in the layers' places inside the context, which makes `passes` forward passes.

        The model must neither be trained nor moved inside, nor its weights changed.
        """
        try:
            for place in self._places:
                place.fill(passes)
            yield
        finally:
            for place in self._places:
                place.empty()


class _Place:
    """A linear layer's place in its parent."""

    def __init__(self, parent: nn.Module, name: str, linear: nn.Linear) -> None:
        self._parent, self._name, self._linear = parent, name, linear
        self._mark: tuple[int, int] | None = None
        self._passes = 0
        self._copy: _PackedCopy | None = None

    def fill(self, passes: int) -> None:
        weight = self._linear.weight
        if weight.is_inference() or not is_packable(self._linear):  # inference tensors do not count their changes
            return
        mark = weight.data_ptr(), weight._version
        if mark != self._mark:
            self._mark, self._passes, self._copy = mark, 0, None
        self._passes += passes
        if self._copy is None and self._passes > _PASSES_THAT_PAY:
            self._copy = _PackedCopy(self._linear)
        if self._copy is not None:
            setattr(self._parent, self._name, self._copy)

    def empty(self) -> None:
        setattr(self._parent, self._name, self._linear)


class _PackedCopy(PackedLinear):
    """A packed layer beside the plain one, which takes the inputs that oneDNN is not used for otherwise."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.plain = linear

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out); no gradients."""
        if input.dtype == torch.float32 and input.numel() < MIN_ROWS * self.in_features:
            return self.plain(input)
        return super().forward(input)
