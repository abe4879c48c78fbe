"""pass@k against enumeration, bootstrap intervals against what theory says, n-gram overlap against counts by hand."""

import itertools
import math

import numpy as np
import pytest

from openrlhf_ebft.evaluation.ngrams import ngram_overlap
from openrlhf_ebft.evaluation.statistics import bootstrap, bootstrap_mean, pass_at_k


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_equals_enumeration_of_all_subsets(samples):
    for correct in range(samples + 1):
        outcomes = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over all draws of n samples is the true probability that one of k passes."""
    p, samples, k = 0.3, 5, 3
    mean = sum(math.comb(samples, c) * p**c * (1 - p) ** (samples - c) * pass_at_k(samples, c, k) for c in range(6))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    naive = sum(
        math.comb(samples, c) * p**c * (1 - p) ** (samples - c) * (1 - (1 - c / samples) ** k) for c in range(6)
    )
    assert abs(naive - (1 - (1 - p) ** k)) > 0.01  # the plug-in estimate is not


def test_pass_at_k_of_many_samples_is_exact():
    assert pass_at_k(10_000, 1, 10_000) == 1.0
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)


@pytest.mark.parametrize(("samples", "correct", "k"), [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_refuses_numbers_that_do_not_fit(samples, correct, k):
    with pytest.raises(ValueError):
        pass_at_k(samples, correct, k)


def test_interval_is_seeded_and_contains_the_value():
    values = list(np.random.default_rng(0).normal(size=200))
    first = bootstrap_mean(values, seed=1, resamples=500)
    assert first == bootstrap_mean(values, seed=1, resamples=500)
    assert first != bootstrap_mean(values, seed=2, resamples=500)
    assert first.low < first.value < first.high
    half_width = 1.96 * np.std(values, ddof=1) / math.sqrt(200)
    assert (first.high - first.low) / 2 == pytest.approx(half_width, rel=0.15)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    generator = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        estimate = bootstrap_mean(generator.normal(loc=2.0, size=60).tolist(), seed=trial, resamples=200)
        covered += estimate.low <= 2.0 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


def test_ratio_of_means_is_resampled_by_example():
    rows = [(2.0, 1.0), (6.0, 3.0), (10.0, 5.0)]  # the ratio is 2 in every resample
    estimate = bootstrap(rows, lambda means: means[..., 0] / means[..., 1], seed=0, resamples=50)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((2.0, 2.0, 2.0))


def test_single_example_has_no_interval_and_faulty_input_is_named():
    assert bootstrap_mean([1.0], seed=0, resamples=10).low is None
    with pytest.raises(ValueError, match="no example"):
        bootstrap_mean([], seed=0, resamples=10)
    with pytest.raises(ValueError, match="example 1 holds"):
        bootstrap_mean([1.0, math.nan], seed=0, resamples=10)


@pytest.mark.parametrize(
    ("completion", "truth", "order", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 2, 1.0),
        ([1, 2, 3], [4, 5, 6], 1, 0.0),
        ([1, 2, 3, 4], [2, 3, 4, 5], 2, 2 * 2 / 6),
        ([1, 1, 1, 1], [1, 2], 1, 2 * 1 / 6),  # clipped: three of the four are not shared
        ([1], [1], 4, 1.0),
        ([1], [2], 4, 0.0),
        ([], [1, 2, 3, 4, 5], 4, 0.0),
    ],
)
def test_overlap_by_hand(completion, truth, order, expected):
    assert ngram_overlap(completion, truth, order) == pytest.approx(expected)
    assert ngram_overlap(truth, completion, order) == pytest.approx(expected)
