"""Frozen models on x86 CPUs: packed linear layers, and gated layers with fewer passes over their values."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from openrlhf_ebft.core.cpu_linear import PackedLinear, pack_linears

_PARTS = "gate_proj", "up_proj", "down_proj"
_PROBE_ROWS = 8
_TOLERANCE = 0.02  # of the largest output; bfloat16 rounds to 0.004


def pack_frozen_model(model: nn.Module) -> None:
    """Packs the linear layers of a frozen model and fuses its gated layers, in place; nothing happens on GPUs.

    The model can be read through afterwards, but no longer be trained, saved or moved.
    """
    if pack_linears(model):
        fuse_gated_layers(model)


def fuse_gated_layers(model: nn.Module) -> int:
    """Replaces layers down(silu(gate(x)) * up(x)) whose linear layers are packed in bfloat16; returns how many.

    A layer is known by the names that transformers gives its parts, and replaced only where both give the same on
    random rows. Intermediate values stay in float32, so outputs differ from the plain layer's by bfloat16's rounding.
    """
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    count = 0
    for parent, name, child in found:
        fused = _fused(child)
        if fused is not None and _agree(child, fused):
            setattr(parent, name, fused)
            count += 1
    return count


def _fused(module: nn.Module) -> _GatedLayer | None:
    """The layer that takes the module's place, if the module has its parts."""
    parts = dict(module.named_children())
    linears = [part for name in _PARTS if isinstance(part := parts.get(name), PackedLinear)]
    if len(linears) < len(_PARTS) or any(part.dtype != torch.bfloat16 for part in linears):
        return None
    is_silu = type(parts.get("act_fn")).__name__ in ("SiLU", "SiLUActivation")
    return _GatedLayer(*linears) if is_silu and len(inspect.signature(module.forward).parameters) == 1 else None


@torch.no_grad()
def _agree(plain: nn.Module, fused: _GatedLayer) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_PROBE_ROWS, fused.gate_proj.in_features, generator=generator).to(torch.bfloat16)
    wanted, got = plain(rows), fused(rows)
    return wanted.shape == got.shape and bool((wanted - got).abs().max() <= _TOLERANCE * wanted.abs().max())


class _GatedLayer(nn.Module):
    def __init__(self, gate_proj: PackedLinear, up_proj: PackedLinear, down_proj: PackedLinear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in) -> (..., in) bfloat16; no gradients."""
        gated = self.gate_proj.activated(rows, "swish")
        return self.down_proj(self.up_proj.times(rows, gated))
