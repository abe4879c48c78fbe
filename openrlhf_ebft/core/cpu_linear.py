"""Float32 linear layers on x86 CPUs through oneDNN instead of MKL.

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
_MIN_ROWS = 8


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
        plain = _is_plain(self.weight) and _is_plain(input) and input.numel() >= _MIN_ROWS * self.in_features
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
