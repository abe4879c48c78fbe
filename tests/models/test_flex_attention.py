"""Flex attention, compiled for the CPU, against the dense mask. Its backward pass exists on GPUs only."""

import pytest
import torch

from openrlhf_ebft.config.sections import FeatureConfig
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.distributed.device import plain_attention
from openrlhf_ebft.models.feature_network import FeatureNetwork
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.tree_features import TreeFeatures
from tests.core.test_block_masks import CASES
from tests.models.test_policy import build, trees


@pytest.fixture(autouse=True)
def compiled_for_one_shape():
    """torch 2.13 writes broken C++ for a second shape, which it would compile for all shapes at once."""
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_flex_equals_the_dense_mask(family):
    """Gemma 2 has layers with a sliding window, others without, and capped scores."""
    model = build(family, "eager")
    with torch.no_grad():
        for batch_trees in (trees(), CASES["across documents"]):
            torch.compiler.reset()
            dense = PolicyModel(model, "eager", temperature=0.6, chunk_tokens=64)(TreeBatch.collate(batch_trees))
            flex_policy = PolicyModel(model, "flex", temperature=0.6, chunk_tokens=64)
            assert model.config._attn_implementation == "flex_attention"
            flex = flex_policy(TreeBatch.collate(batch_trees, padding_side="left"))
            torch.testing.assert_close(flex.branch, dense.branch, atol=1e-4, rtol=0)
            torch.testing.assert_close(flex.supervised, dense.supervised, atol=1e-4, rtol=0)
            model.set_attn_implementation("eager")


def test_features_through_flex_equal_those_through_the_dense_mask():
    network = FeatureNetwork(build("llama", "sdpa").base_model, [1, 2], 2)
    config = FeatureConfig(embed_method="last_token", whitening="none")
    dense = TreeFeatures(network, config, special_ids=(), mode="sdpa").group_grams(CASES["packed"])
    flex = TreeFeatures(network, config, special_ids=(), mode="flex").group_grams(CASES["packed"])
    assert network.backbone.config._attn_implementation == "flex_attention"
    for one, other in zip(dense, flex, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_what_cannot_run_flex_is_named():
    with pytest.raises(ValueError, match=r"'gpt2' does not take flex attention; set model.attention to sdpa or rows"):
        PolicyModel(build("gpt2", "sdpa"), "flex", temperature=1.0, chunk_tokens=64)
    with pytest.raises(
        ValueError, match="model.attention = flex needs a GPU, but this process has none: set it to split or sdpa"
    ):
        plain_attention("flex", torch.device("cpu"))
