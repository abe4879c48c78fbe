"""The reference model's log-probabilities against every completion alone, in any cut of the batch."""

import math

import pytest
import torch

from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.reference_model import ReferenceModel
from tests.models.test_policy import build, logprobs_alone, trees


def make(model, limit, chunk_tokens=100):
    policy = PolicyModel(model, "sdpa", temperature=0.6, chunk_tokens=chunk_tokens, with_entropy=False)
    return ReferenceModel(policy, limit)


@pytest.mark.parametrize("limit", [1, 30, 1000])
def test_every_cut_gives_the_log_probabilities_of_completions_alone(limit):
    model = build("llama", "sdpa")
    with torch.no_grad():
        expected = [logprobs_alone(model, tree, 0.6)[0] for tree in trees()]
    values = make(model, limit, chunk_tokens=5).logprobs(trees())
    assert [len(value) for value in values] == [tree.branch_tokens.numel() for tree in trees()]
    for value, alone in zip(values, expected, strict=True):
        assert value.dtype == torch.float32 and not value.requires_grad
        torch.testing.assert_close(value, alone, atol=1e-4, rtol=0)


def test_the_same_weights_as_the_policy_give_a_kl_of_zero():
    model = build("llama", "sdpa")
    policy = PolicyModel(model, "sdpa", temperature=0.6, chunk_tokens=100)
    now = policy(TreeBatch.collate(trees())).branch
    torch.testing.assert_close(torch.cat(make(model, 1000).logprobs(trees())), now.detach(), atol=1e-6, rtol=0)


def test_the_model_is_frozen_and_in_evaluation():
    reference = make(build("gpt2", "sdpa").train(), 1000)
    assert not reference.model.training
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


def test_a_model_that_is_not_finite_names_the_example():
    model = build("llama", "sdpa")
    with torch.no_grad():
        model.get_input_embeddings().weight[int(trees()[1].branch_tokens[0])] = math.nan
    with pytest.raises(ValueError, match="example-.*log-probabilities are not finite"):
        make(model, 1000).logprobs(trees())
