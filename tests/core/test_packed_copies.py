"""Packed copies of linear weights: same results, made again when weights change, gone outside the context."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openrlhf_ebft.core.cpu_linear import PackedLinear, has_onednn_linear, use_onednn_linears
from openrlhf_ebft.core.packed_copies import PackedCopies

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this processor or PyTorch has no such kernel")

ENOUGH = 9  # forward passes after which a copy is made


def network(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 128), nn.Sequential(nn.Linear(128, 96, bias=False), nn.Linear(96, 3))).to(dtype)
    use_onednn_linears(model)
    return model.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 8, 40])
def test_results_are_those_of_the_layers_themselves(dtype, rows):
    model, values = network(dtype), torch.randn(rows, 96).to(dtype)
    plain = model(values)
    with PackedCopies(model).in_use(ENOUGH):
        assert isinstance(model[0], PackedLinear)
        assert isinstance(model[1][0], PackedLinear)
        assert type(model[1][1]) is not PackedLinear  # too small to be worth it
        torch.testing.assert_close(model(values), plain, atol=1e-6, rtol=1e-6)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.0.weight", "1.1.weight", "1.1.bias"]


def test_copies_follow_the_weights_and_only_changed_layers_are_packed_again():
    model, values = network(torch.bfloat16), torch.randn(20, 96).bfloat16()
    copies = PackedCopies(model)
    with copies.in_use(ENOUGH):
        first, second = model[0], model[1][0]
    with torch.no_grad():
        model[0].weight.mul_(2)
    with copies.in_use(1):
        assert not isinstance(model[0], PackedLinear)  # one pass does not pay
        assert model[1][0] is second
    with copies.in_use(ENOUGH):
        assert isinstance(model[0], PackedLinear)
        assert model[0] is not first
        packed = model(values)
    torch.testing.assert_close(packed, model(values), atol=1e-2, rtol=1e-2)


def test_a_copy_pays_after_several_calls_with_the_same_weights():
    model = network(torch.bfloat16)
    copies = PackedCopies(model)
    for call in range(ENOUGH):
        with copies.in_use(1):
            assert isinstance(model[0], PackedLinear) == (call == ENOUGH - 1)


def test_an_error_inside_puts_the_layers_back():
    model = network(torch.float32)
    with pytest.raises(ValueError, match="inside"), PackedCopies(model).in_use(ENOUGH):
        raise ValueError("inside")
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_weights_that_do_not_count_their_changes_are_left_alone():
    with torch.inference_mode():
        model = network(torch.bfloat16)
    with PackedCopies(model).in_use(ENOUGH):
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
