"""Linear layers through oneDNN against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from openrlhf_ebft.core.cpu_frozen import pack_frozen_model
from openrlhf_ebft.core.cpu_linear import (
    OneDNNLinear,
    PackedLinear,
    has_onednn_linear,
    pack_linears,
    use_onednn_linears,
)

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this processor or PyTorch has no such kernel")


def layers(bias):
    torch.manual_seed(0)
    plain = nn.Linear(48, 72, bias=bias)
    fast = copy.deepcopy(plain)
    assert use_onednn_linears(fast) == 1
    return plain.double(), fast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 48), (7, 48), (8, 48), (1, 300, 48), (48,), (0, 48), (2, 0, 48)])
def test_results_and_gradients_equal_those_in_float64(bias, shape):
    plain, fast = layers(bias)
    values = torch.randn(shape, dtype=torch.float64)
    weights = torch.randn(*shape[:-1], 72, dtype=torch.float64)
    inputs = [values.clone().requires_grad_(), values.float().requires_grad_()]
    for module, given in zip((plain, fast), inputs, strict=True):
        (module(given) * weights.to(given.dtype)).sum().backward()
    torch.testing.assert_close(fast(inputs[1]).double(), plain(inputs[0]), atol=1e-5, rtol=1e-5)
    for ours, exact in zip((inputs[1], *fast.parameters()), (inputs[0], *plain.parameters()), strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-4, rtol=1e-5)


def test_rows_of_any_layout_are_read_right():
    plain, fast = layers(True)
    transposed = torch.randn(48, 40, dtype=torch.float64).t()
    expanded = torch.randn(1, 48, dtype=torch.float64).expand(20, -1)
    sliced = torch.randn(40, 96, dtype=torch.float64)[:, ::2]
    for values in (transposed, expanded, sliced):
        torch.testing.assert_close(fast(values.float()).double(), plain(values), atol=1e-5, rtol=1e-5)


def test_frozen_weights_get_no_gradient_and_the_input_does():
    _, fast = layers(True)
    fast.requires_grad_(False)
    values = torch.randn(20, 48, requires_grad=True)
    fast(values).sum().backward()
    assert fast.weight.grad is None
    assert fast.bias.grad is None
    torch.testing.assert_close(values.grad, fast.weight.sum(0).expand(20, -1))


def test_other_precisions_and_subclasses_are_left_alone():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), Special(4, 4))
    assert use_onednn_linears(model) == 1
    assert [type(module) for module in model] == [OneDNNLinear, nn.Linear, Special]
    values = torch.randn(10, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](values).dtype == torch.bfloat16
    assert model[0].bfloat16()(values.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 64), (2, 200, 64), (0, 64)])
def test_packed_layers_give_the_plain_layers_numbers(dtype, shape):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False)).to(dtype)
    packed = copy.deepcopy(plain)
    assert pack_linears(packed) == 2
    assert packed[0].weight.dtype == dtype and packed[0].weight.shape == (96, 64), "some models read no more of it"
    values = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        exact = nn.Sequential(*(copy.deepcopy(layer).double() for layer in plain))(values.double())
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(packed(values).double(), exact, atol=tolerance, rtol=tolerance)


def test_small_heads_and_other_precisions_are_not_packed():
    model = nn.ModuleDict({"head": nn.Linear(64, 2), "other": nn.Linear(64, 96).half(), "body": nn.Linear(64, 96)})
    assert pack_linears(model) == 1
    assert [name for name, layer in model.items() if isinstance(layer, PackedLinear)] == ["body"]


def test_a_packed_layer_says_what_it_cannot_do():
    layer = nn.Sequential(nn.Linear(64, 96))
    pack_linears(layer)
    with pytest.raises(RuntimeError, match=r"packed in torch.float32 for the CPU got torch.bfloat16"):
        layer(torch.zeros(2, 64, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="no gradients"):
        layer(torch.zeros(2, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match="cannot be saved"):
        layer.state_dict()


class Gated(nn.Module):
    """The layer that transformers has in Llama and its like; `scale` makes one of another formula."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96, bias=False)
        self.down_proj, self.act_fn, self.scale = nn.Linear(96, 64), nn.SiLU(), scale

    def forward(self, rows):
        return self.down_proj(self.act_fn(self.gate_proj(rows) * self.scale) * self.up_proj(rows))


def test_gated_layers_of_frozen_bfloat16_models_are_fused():
    """As near to float64 as the plain layer."""
    torch.manual_seed(0)
    exact = nn.Sequential(Gated(), Gated()).to(torch.bfloat16).double()
    plain = copy.deepcopy(exact).to(torch.bfloat16).requires_grad_(False)
    fused = copy.deepcopy(plain)
    pack_frozen_model(fused)
    assert [type(part).__name__ for part in fused] == ["_GatedLayer"] * 2
    rows = torch.randn(2, 30, 64, dtype=torch.float64).to(torch.bfloat16)
    errors = [(model(rows).double() - exact(rows.double())).abs().mean() for model in (fused, plain)]
    assert errors[0] <= errors[1] * 1.05 < 0.01


def test_layers_of_other_formulas_and_precisions_are_not_fused():
    others = [Gated(scale=0.5).to(torch.bfloat16), Gated()]
    others.append(Gated().to(torch.bfloat16))
    others[-1].act_fn = nn.GELU()
    for layer in others:
        model = nn.Sequential(layer.requires_grad_(False))
        pack_frozen_model(model)
        assert isinstance(model[0], Gated) and isinstance(model[0].gate_proj, PackedLinear)
