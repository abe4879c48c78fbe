"""Features over trees equal a plain pass over every completion alone, for every pooling and layout."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, ConvBertConfig, FNetConfig

from openrlhf_ebft.config.sections import FeatureConfig
from openrlhf_ebft.core.rewards import compute_rewards
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.models.feature_network import load_feature_network
from openrlhf_ebft.models.tree_features import TreeFeatures
from tests.tiny_models import EOS_ID, tiny_gpt2, tiny_llama
from tests.trees import make_reference, make_tree

METHODS = ["last_token", "completion_mean", "mean_pooling", "concat", "concat_tokens"]


def with_eos(tree: RolloutTree) -> RolloutTree:
    """The last token of every completion and of the reference becomes EOS; the first completion is EOS alone."""
    tokens = tree.branch_tokens.clone()
    lengths = tree.branch_lengths.flatten()
    tokens[torch.cumsum(lengths, 0) - 1] = EOS_ID
    reference = tree.reference.token_ids.clone()
    reference[-1] = EOS_ID
    changed = type(tree.reference)(**{**vars(tree.reference), "token_ids": reference})
    return RolloutTree(changed, tokens, tree.branch_lengths, tree.sampler_logprobs)


def trees():
    return [
        with_eos(make_tree(make_reference(9, [4], seed=1), [[1, 6, 3]], seed=2)),
        with_eos(make_tree(make_reference(14, [3, 7, 10], seed=3), [[4, 2], [1, 5], [3, 3]], seed=4)),
    ]


def plain_embedding(model, taps, context, own, method):
    """Written out from the definitions: L2 of the concatenated taps, then pooling without EOS."""
    ids = torch.cat([context, own])
    states = model(ids[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer][0] for layer in taps], -1).double()
    features = features / features.norm(dim=-1, keepdim=True)
    kept = [i for i, token in enumerate(own.tolist()) if token != EOS_ID] or list(range(len(own)))
    completion = features[len(context) :][kept]
    row = torch.cat([features[: len(context)], completion])
    if method == "concat_tokens":
        places = torch.zeros(16, features.shape[1], dtype=features.dtype)
        places[kept] = completion
        return places.flatten()
    if method == "last_token":
        return completion[-1]
    if method == "completion_mean":
        return completion.mean(0)
    if method == "mean_pooling":
        return row.mean(0)
    return torch.cat([row[quarter * len(row) // 4] for quarter in (1, 2, 3)])


def plain_gram(model, taps, tree, anchor, method):
    start = int(tree.reference.anchors[anchor])
    reference = tree.reference.token_ids
    rows = [tree.token_ids[tree.branch_indices(anchor * tree.num_samples + j)] for j in range(tree.num_samples)]
    owns = [row[start:] for row in rows]
    owns.append(reference[start : start + int(tree.reference.window_lengths[anchor])])
    phi = torch.stack([plain_embedding(model, taps, reference[:start], own, method) for own in owns])
    return phi @ phi.T


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("mode", ["sdpa", "rows", "split"])
@pytest.mark.parametrize("method", METHODS)
def test_grams_equal_every_completion_alone(tmp_path, family, mode, method):
    family(tmp_path)
    network = load_feature_network(str(tmp_path), (0.5, 1.0), torch.float32)
    features = TreeFeatures(network, FeatureConfig(embed_method=method), special_ids={EOS_ID}, mode=mode)
    grams = features.group_grams(trees())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        for tree, gram in zip(trees(), grams, strict=True):
            for anchor in range(tree.num_anchors):
                expected = plain_gram(model, (1, 2), tree, anchor, method)
                torch.testing.assert_close(gram[anchor], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [BertConfig, ConvBertConfig, FNetConfig])
def test_a_bidirectional_network_reads_every_completion_as_if_alone(tmp_path, config):
    """B01, B62: neither padding nor other completions count, also where a network ignores its padding mask."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = AutoModel.from_config(config(vocab_size=64, initializer_range=0.2, **shape)).eval()
    model.save_pretrained(tmp_path)
    network = load_feature_network(str(tmp_path), (0.5, 1.0), torch.float32, attention="eager")
    assert not network.is_causal
    features = TreeFeatures(network, FeatureConfig(embed_method="completion_mean"), special_ids={EOS_ID}, mode="sdpa")
    stopped = make_tree(make_reference(9, [4], seed=1), [[3, 4, 3]], seed=2)
    text = torch.tensor([7, 8, 9])
    stopped = replace(stopped, branch_tokens=torch.cat([text, text, torch.tensor([EOS_ID]), text]))
    chosen = [*trees(), stopped]
    with torch.no_grad():
        for tree, gram in zip(chosen, features.group_grams(chosen), strict=True):
            for anchor in range(tree.num_anchors):
                expected = plain_gram(model, (1, 2), tree, anchor, "completion_mean")
                torch.testing.assert_close(gram[anchor], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["last_token", "completion_mean", "concat_tokens"])
def test_case_b60_equal_completions_do_not_differ_by_rounding(tmp_path, method):
    """Whitening would blow up what bfloat16 leaves between copies: other rewards for each, and all of them diverse."""
    tiny_llama(tmp_path)
    network = load_feature_network(str(tmp_path), (0.5, 1.0), torch.bfloat16)
    features = TreeFeatures(network, FeatureConfig(embed_method=method), special_ids={EOS_ID}, mode="sdpa")
    tree = make_tree(make_reference(60, [30], window=8, seed=1), [[8, 8, 8, 8, 8, 8, 9, 8]], seed=2)
    text = tree.branch_tokens[:8]
    stopped = torch.cat([text, torch.tensor([EOS_ID])])  # EOS is not pooled
    truth = tree.reference.token_ids[30:38]
    (gram,) = features.group_grams([replace(tree, branch_tokens=torch.cat([text.repeat(6), stopped, truth]))])
    copies = gram[0, :7]
    torch.testing.assert_close(copies, copies[:1].expand_as(copies), atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(gram[0, 7], gram[0, 8], atol=1e-14, rtol=1e-14)
    rewards = compute_rewards(gram)
    torch.testing.assert_close(rewards.alignment[0], torch.tensor([0.0] * 7 + [1.0]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(rewards.reward[0, :7], rewards.reward[0, :1].expand(7), atol=1e-9, rtol=0)


def test_batches_of_any_size_give_the_same_grams(tmp_path):
    tiny_llama(tmp_path)
    network = load_feature_network(str(tmp_path), (0.5, 1.0), torch.float32)
    results = []
    for limit in (1, 50, 8192):
        config = FeatureConfig(embed_method="completion_mean", max_tokens_per_batch=limit)
        results.append(TreeFeatures(network, config, special_ids=(), mode="sdpa").group_grams(trees()))
    for grams in results[1:]:
        for first, other in zip(results[0], grams, strict=True):
            torch.testing.assert_close(first, other, atol=1e-5, rtol=1e-5)


def test_an_anchor_without_ground_truth_is_named(tmp_path):
    tiny_llama(tmp_path)
    network = load_feature_network(str(tmp_path), (1.0,), torch.float32)
    features = TreeFeatures(network, FeatureConfig(embed_method="completion_mean"), special_ids=(), mode="sdpa")
    with pytest.raises(ValueError, match="example-7"):
        features.group_grams([make_tree(make_reference(4, [4], seed=7), [[2]])])
