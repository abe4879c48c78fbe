"""Linear layers on x86 CPUs through oneDNN: float32 ones instead of MKL, frozen ones with packed weights.

PyTorch multiplies float32 matrices with MKL, whose kernels reach less than half of the speed of oneDNN's on CPUs of
other vendors (108 against 250 GFLOP/s on one core of an AMD EPYC with AVX-512) and about the same on Intel's. The
precision is that of float32 in both.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Below this many rows reading the weight takes the time, and MKL has the smaller overhead.
MIN_ROWS = 8
# Packing pays where the rows are few beside the weight; a head of some outputs is not worth it.
_MIN_PACKED_WEIGHT = 2**12
_PACKED_ROWS = 128  # rows of a typical product, for which oneDNN chooses the order of the weight


def has_onednn_linear() -> bool:
    """Whether this PyTorch and this processor have the kernel; elsewhere `nn.Linear` is the right one."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn_linears(model: nn.Module) -> int:
    """Turns every float32 `nn.Linear` of `model` on the CPU into an `OneDNNLinear`, in place; returns how many.

    Parameters, their names and hooks stay as they are. Subclasses of `nn.Linear` are left alone.
    """
    if not has_onednn_linear():
        return 0
    found = [m for m in model.modules() if type(m) is nn.Linear and _is_plain(m.weight)]
    for module in found:
        module.__class__ = OneDNNLinear
    return len(found)


class OneDNNLinear(nn.Linear):
    """`nn.Linear` whose float32 products on the CPU, backward ones too, run in oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        plain = _is_plain(self.weight) and _is_plain(input) and input.numel() >= MIN_ROWS * self.in_features
        if not plain or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        return _Linear.apply(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], self.out_features)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _product(rows: Tensor, columns: Tensor, bias: Tensor | None = None) -> Tensor:
    """(M, K) times (N, K) transposed, plus (N,): (M, N)."""
    return torch.ops.mkldnn._linear_pointwise(rows, columns, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """rows (M, in), weight (out, in), bias (out,) or None -> (M, out)."""
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """gradient (M, out) -> those of rows, weight and bias."""
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight.t()) if for_rows else None,
            _product(gradient.t(), rows.t()) if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


def pack_linears(model: nn.Module) -> int:
    """Turns the linear layers of a frozen model on the CPU into `PackedLinear`s, in place; returns how many.

    float32 and bfloat16 weights of plain linear layers are packed, and the originals let go, so memory stays the same.
    The model can be read through afterwards, but no longer be trained, saved or moved.
    """
    if not has_onednn_linear():
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and is_packable(child):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def is_packable(module: nn.Linear) -> bool:
    """Whether a `PackedLinear` can take the layer's place, and would be worth it."""
    weight = module.weight
    is_known = type(module) in (nn.Linear, OneDNNLinear)
    is_known = is_known and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    if weight.dtype == torch.bfloat16:
        is_known = is_known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return is_known and weight.numel() >= _MIN_PACKED_WEIGHT


class PackedLinear(nn.Module):
    """A frozen linear layer on the CPU whose weight lies in the order that oneDNN works in.

    A plain layer's weight is brought into that order again by every call, which takes about as long as the product
    itself when only some dozen rows are multiplied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACKED_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """A stand-in without memory: some models read the type and shape of a layer's weight."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out); no gradients.

        Raises RuntimeError for another precision than the weight's, and where a gradient is asked for.
        """
        return self.activated(input, "none")

    def activated(self, input: Tensor, function: str) -> Tensor:
        """`forward` and a function that oneDNN knows, such as "swish", without a pass over the result."""
        self._check(input)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, function, [], "")

    def times(self, input: Tensor, factor: Tensor) -> Tensor:
        """`forward` times a factor (..., out) of the same precision."""
        self._check(input)
        return torch.ops.mkldnn._linear_pointwise.binary(input, factor, self._packed, self._bias, "mul")

    def _check(self, input: Tensor) -> None:
        if input.dtype != self.dtype or input.device.type != "cpu":
            raise RuntimeError(f"a layer packed in {self.dtype} for the CPU got {input.dtype} on {input.device}")
        if torch.is_grad_enabled() and input.requires_grad:
            raise RuntimeError("a packed layer has no gradients: load the model again without packing to train it")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a packed layer cannot be saved: load the model again without packing")
