"""Distributions that tokens are drawn from, and the drawing itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.rollouts.sampling import draw_uniforms, pick_tokens, sampler_logprobs

PLAIN = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=())
LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()


def probabilities(**changes):
    return sampler_logprobs(LOGITS, dataclasses.replace(PLAIN, **changes)).exp()


def test_temperature_closed_form():
    """Logits [0, ln 3] at temperature 0.5: the log-probability of token 1 is ln 0.9."""
    logprobs = sampler_logprobs(torch.tensor([[0.0, math.log(3)]]), dataclasses.replace(PLAIN, temperature=0.5))
    assert logprobs[0, 1].item() == pytest.approx(-0.105361, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "first_row"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_k": 4}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.45}, [1, 0, 0, 0]),
        ({"top_p": 0.55}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0.625, 0.375, 0, 0]),  # after top-k the first two hold 0.842
        ({"temperature": 0.0, "top_k": 2}, [0.5, 0.3, 0.15, 0.05]),  # greedy: filters are off
    ],
)
def test_filters(changes, first_row):
    result = probabilities(**changes)
    assert torch.allclose(result[0], torch.tensor(first_row, dtype=torch.float32), atol=1e-6)
    assert torch.allclose(result[1], result[0].flip(0))


def test_bfloat16_logits_are_computed_in_float32():
    logprobs = sampler_logprobs(LOGITS.bfloat16(), PLAIN)
    assert logprobs.dtype == torch.float32
    assert logprobs.exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-6)


def test_inverse_cumulative_distribution():
    logprobs = sampler_logprobs(LOGITS[:1], PLAIN).expand(6, -1)
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.94, 1 - 2**-24], dtype=torch.float64)
    assert pick_tokens(logprobs, uniforms, PLAIN).tolist() == [0, 0, 1, 1, 2, 3]


def test_impossible_tokens_are_never_picked():
    logprobs = torch.tensor([[-torch.inf, 0.5, -torch.inf, 0.5, -torch.inf]]).log_softmax(-1).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.499, 0.501, 1 - 2**-24], dtype=torch.float64)
    assert pick_tokens(logprobs, uniforms, PLAIN).tolist() == [1, 1, 3, 3]


def test_frequencies_follow_the_distribution():
    uniforms = draw_uniforms(range(20_000), 1)[:, 0]
    picked = pick_tokens(sampler_logprobs(LOGITS[:1], PLAIN).expand(20_000, -1), uniforms, PLAIN)
    shares = picked.bincount(minlength=4) / 20_000
    assert torch.allclose(shares, LOGITS[0].exp(), atol=0.015)  # about 4 standard errors


def test_greedy_takes_the_largest():
    greedy = dataclasses.replace(PLAIN, temperature=0.0)
    assert pick_tokens(LOGITS, torch.zeros(2, dtype=torch.float64), greedy).tolist() == [0, 3]


def test_streams_depend_on_the_seed_alone():
    long = draw_uniforms([7, 2**47 + 3, 8], 5)
    assert torch.equal(draw_uniforms([2**47 + 3], 5)[0], long[1])
    assert torch.equal(draw_uniforms([7], 3)[0], long[0, :3])
    assert long.unique().numel() == 15
    assert (long * (1.0 + 1e-12) < 1.0).all()
