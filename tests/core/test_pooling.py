"""Pooling: golden values, padding on either side, and rows with nothing to pool."""

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.core.pooling import apply_embed_method, normalize_tokens, pool_rows, poolable_mask

METHODS = ["last_token", "mean_pooling", "completion_mean", "concat"]


@pytest.fixture
def golden() -> dict[str, torch.Tensor]:
    file = np.load(Path(__file__).parents[1] / "golden" / "pooling.npz")
    return {key: torch.from_numpy(value) for key, value in file.items()}


@pytest.mark.parametrize("method", METHODS)
def test_golden(golden, method):
    pooled = apply_embed_method(golden["hidden"], method, golden["attention_mask"], golden["prompt_lengths"])
    torch.testing.assert_close(pooled, golden[method], atol=1e-5, rtol=1e-5)
    pooled = apply_embed_method(golden["hidden"], method, prompt_lengths=golden["prompt_lengths"])
    torch.testing.assert_close(pooled, golden[f"{method}_nomask"], atol=1e-5, rtol=1e-5)


def test_case_b01_last_token_counts_valid_tokens():
    hidden = torch.arange(6.0).view(1, 6, 1).expand(2, 6, 1)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    assert apply_embed_method(hidden, "last_token", mask).flatten().tolist() == [3, 5]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_padding_side_does_not_matter_and_padding_is_never_read(method, dtype):
    torch.manual_seed(0)
    for length in range(2, 9):
        row = torch.randn(1, length, 3).to(dtype).requires_grad_()
        prompt = torch.tensor([length // 2])
        alone = apply_embed_method(row, method, prompt_lengths=prompt)
        assert alone.dtype == dtype
        assert not alone.requires_grad
        for left in range(4):
            right = 3 - left
            padded = torch.full((1, length + 3, 3), torch.nan, dtype=dtype)
            padded[:, left : left + length] = row.detach()
            mask = torch.tensor([[0] * left + [1] * length + [0] * right])
            for kind in (torch.long, torch.bool, torch.float32):
                pooled = apply_embed_method(padded, method, mask.to(kind), prompt)
                torch.testing.assert_close(pooled, alone, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_concat_takes_the_quartiles_of_the_valid_tokens():
    hidden = torch.arange(12.0).view(1, 12, 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]])
    assert apply_embed_method(hidden, "concat", mask).tolist() == [[2 + 7 // 4, 2 + 7 // 2, 2 + 21 // 4]]


def test_bfloat16_mean_is_computed_in_float32():
    hidden = torch.ones(1, 4096, 1, dtype=torch.bfloat16) * 1.0078125
    assert apply_embed_method(hidden, "mean_pooling").item() == 1.0078125


def test_concat_tokens_needs_full_windows():
    hidden = torch.arange(12.0).view(2, 3, 2)
    full = torch.ones(2, 3, dtype=torch.bool)
    assert pool_rows(hidden, full, full, "concat_tokens").tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    full[1, 2] = False
    with pytest.raises(ValueError, match=r"3 valid tokens.*has 2"):
        pool_rows(hidden, full, full, "concat_tokens")


@pytest.mark.parametrize("method", METHODS)
def test_row_without_valid_token_is_named(method):
    mask = torch.tensor([[1, 1], [0, 0], [1, 0]])
    with pytest.raises(ValueError, match=r"rows \[1\] of 3"):
        apply_embed_method(torch.ones(3, 2, 4), method, mask, torch.zeros(3, dtype=torch.long))


def test_bad_input_states_both_numbers():
    hidden, mask = torch.ones(2, 5, 4), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="prompt_lengths"):
        apply_embed_method(hidden, "completion_mean", mask)
    with pytest.raises(ValueError, match=r"prompt_lengths\[0\] = 4.*3 tokens"):
        apply_embed_method(hidden, "completion_mean", mask, torch.tensor([4, 2]))
    with pytest.raises(ValueError, match=r"prompt_lengths\[1\] = -1"):
        apply_embed_method(hidden, "last_token", mask, torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"completion token.*rows \[0\]"):
        apply_embed_method(hidden, "completion_mean", mask, torch.tensor([3, 2]))
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(2, 4\)"):
        apply_embed_method(hidden, "last_token", mask[:, :4])
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        apply_embed_method(hidden, "last_token", mask, torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match=r"0 .* and 1"):
        apply_embed_method(hidden, "last_token", mask * 2)
    with pytest.raises(ValueError, match=r"\(B, S, D\).*\(2, 5\)"):
        apply_embed_method(hidden[..., 0], "last_token", mask)
    with pytest.raises(ValueError, match=r"unknown pooling method 'cls'.*last_token"):
        apply_embed_method(hidden, "cls", mask)
    with pytest.raises(ValueError, match="int64"):
        apply_embed_method(hidden.long(), "last_token", mask)


def test_normalize_tokens():
    states = torch.tensor([[3.0, 4, 0, 12], [0, 0, 0, 0]])
    joint = normalize_tokens(states, 2, "joint")
    torch.testing.assert_close(joint, torch.tensor([[3.0, 4, 0, 12], [0, 0, 0, 0]]) / 13)
    per_layer = normalize_tokens(states, 2, "per_layer")
    torch.testing.assert_close(per_layer, torch.tensor([[0.6, 0.8, 0, 1], [0, 0, 0, 0]]))
    assert torch.equal(normalize_tokens(states, 2, "none"), states)
    with pytest.raises(ValueError, match=r"4.*3"):
        normalize_tokens(states, 3, "joint")
    with pytest.raises(ValueError, match="both"):
        normalize_tokens(states, 2, "both")


def test_special_tokens_do_not_enter_pooling_unless_alone():
    tokens = torch.tensor([[5, 6, 2, 0], [2, 0, 0, 0], [1, 7, 8, 9]])
    valid = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    mask = poolable_mask(tokens, valid, {0, 1, 2})
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 1]]
    assert torch.equal(poolable_mask(tokens, valid, set()), valid)
    with pytest.raises(ValueError, match="differ"):
        poolable_mask(tokens, valid[:, :3], {2})
