"""Distributions that tokens are drawn from, and the drawing itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.rollouts.sampling import draw_tokens, draw_uniforms, sampler_logits

PLAIN = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=())
LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()


def probabilities(**changes):
    return sampler_logits(LOGITS, dataclasses.replace(PLAIN, **changes)).softmax(-1)


def test_temperature_closed_form():
    """Logits [0, ln 3] at temperature 0.5: the log-probability of token 1 is ln 0.9."""
    logits = torch.tensor([[0.0, math.log(3)]])
    tokens, logprobs = draw_tokens(logits, torch.tensor([0.5]).double(), dataclasses.replace(PLAIN, temperature=0.5))
    assert (tokens.item(), logprobs.item()) == (1, pytest.approx(-0.105361, abs=1e-6))
    assert logits[0, 1].item() == pytest.approx(math.log(3))  # scaled in a copy, never in place


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
    logits = sampler_logits(LOGITS.bfloat16(), PLAIN)
    assert logits.dtype == torch.float32
    _, logprobs = draw_tokens(LOGITS.bfloat16(), torch.tensor([0.1, 0.1]).double(), PLAIN)
    assert logprobs.tolist() == pytest.approx(logits.log_softmax(-1).gather(1, torch.tensor([[0], [1]]))[:, 0].tolist())


def test_inverse_cumulative_distribution():
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.94, 1 - 2**-24], dtype=torch.float64)
    tokens, _ = draw_tokens(LOGITS[:1].expand(6, -1), uniforms, PLAIN)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 3]


def test_impossible_tokens_are_never_picked():
    logits = torch.tensor([[-torch.inf, 0.5, -torch.inf, 0.5, -torch.inf]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.499, 0.501, 1 - 2**-24], dtype=torch.float64)
    assert draw_tokens(logits, uniforms, PLAIN)[0].tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.6}, {"top_k": 50, "top_p": 0.8}, {"temperature": 0.0}])
def test_blocks_of_rows_and_vocabulary_change_nothing(changes):
    """77 distributions over 1,000 tokens with 0 to 3 numbers each, against the plain cumulative sum in float64."""
    sampling = dataclasses.replace(PLAIN, **changes)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(77, 1000, generator=generator) * 3
    rows = torch.randint(0, 4, (77,), generator=generator)
    rows = torch.arange(77).repeat_interleave(rows)
    uniforms = torch.rand(len(rows), generator=generator).double()
    tokens, logprobs = draw_tokens(logits, uniforms, sampling, rows)
    exact = sampler_logits(logits, sampling).double().log_softmax(-1)[rows]
    wanted = torch.searchsorted(exact.exp().cumsum(-1), uniforms[:, None], right=True)[:, 0]
    wanted = logits[rows].argmax(-1) if sampling.temperature == 0 else wanted
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-6, rtol=0)


def test_frequencies_follow_the_distribution():
    uniforms = draw_uniforms(range(20_000), 1)[:, 0]
    rows = torch.zeros(20_000, dtype=torch.int64)
    shares = draw_tokens(LOGITS[:1], uniforms, PLAIN, rows)[0].bincount(minlength=4) / 20_000
    assert torch.allclose(shares, LOGITS[0].exp(), atol=0.015)  # about 4 standard errors


def test_greedy_takes_the_largest_logit_even_where_rounding_makes_probabilities_equal():
    greedy = dataclasses.replace(PLAIN, temperature=0.0)
    assert draw_tokens(LOGITS, torch.zeros(2, dtype=torch.float64), greedy)[0].tolist() == [0, 3]
    close = torch.tensor([[-1e-8, 0.0]])
    assert draw_tokens(close, torch.zeros(1, dtype=torch.float64), greedy)[0].tolist() == [1]


def test_streams_depend_on_the_seed_alone():
    long = draw_uniforms([7, 2**47 + 3, 8], 5)
    assert torch.equal(draw_uniforms([2**47 + 3], 5)[0], long[1])
    assert torch.equal(draw_uniforms([7], 3)[0], long[0, :3])
    assert long.unique().numel() == 15
    assert (long * (1.0 + 1e-12) < 1.0).all()
