"""The comparison of two evaluations: paired changes, standard errors, and what is called noise."""

from dataclasses import replace

import pytest

from openrlhf_ebft.core.completion_metrics import completion_metrics
from openrlhf_ebft.core.experience import Completion, Rollout
from openrlhf_ebft.trainer.evaluation import EvaluationResult, ExampleResult, compare
from tests.trees import make_reference


def make_result(ce):
    """An evaluation of as many examples as there are cross-entropies."""
    references = [make_reference(6, [3], seed=seed) for seed in range(len(ce))]
    completions = ((Completion((4, 5), (-0.5, -0.25), "stop"),),)
    rollouts = tuple(Rollout(reference.example_id, completions, weight_version=0) for reference in references)
    examples = tuple(
        ExampleResult(reference.example_id, value, 0.5, 0.25, 0.5, 0.1, None)
        for reference, value in zip(references, ce, strict=True)
    )
    return EvaluationResult(examples, completion_metrics(references, rollouts), rollouts, 0)


def change_of(before, after, name="ce"):
    return {change.name: change for change in compare(make_result(before), make_result(after))}[name]


def test_standard_error_is_that_of_the_paired_differences():
    """Differences -1, -2, -3: mean -2, standard deviation 1."""
    change = change_of([5.0, 9.0, 4.0], [4.0, 7.0, 1.0])
    assert (change.before, change.after, change.change) == (6.0, 4.0, -2.0)
    assert change.standard_error == pytest.approx(3**-0.5)
    assert change.reading == "lower"


def test_small_changes_are_noise():
    assert change_of([1.0, 2.0, 3.0], [2.0, 1.0, 3.5]).reading == "within noise"
    assert change_of([1.0, 2.0], [1.0, 2.0]).reading == "within noise"


def test_one_example_proves_nothing():
    assert change_of([5.0], [1.0]).reading == "within noise"


def test_values_that_a_single_sample_does_not_have_are_left_out():
    names = [change.name for change in compare(make_result([1.0, 2.0]), make_result([1.0, 2.0]))]
    assert "cfm_unbiased" not in names and "cfm" in names


def test_other_examples_cannot_be_paired(tmp_path):
    before = make_result([1.0, 2.0])
    with pytest.raises(ValueError, match="different examples"):
        compare(before, replace(before, examples=before.examples[::-1]))


def test_saved_results_come_back(tmp_path):
    result = make_result([1.0, 2.0])
    result.save(tmp_path / "result.json")
    assert EvaluationResult.load(tmp_path / "result.json") == result
