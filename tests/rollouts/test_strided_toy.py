"""A toy that strided EBFT must solve: tokens of a Markov chain, features that are one-hot in the sampled token.

With windows of one token and one-hot features the expected feature-matching loss of a context is
||p - q||^2 + 1 - ||q||^2, p the policy's and q the chain's next-token distribution: its floor is reached at p = q.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from openrlhf_ebft.config.sections import FeatureConfig
from openrlhf_ebft.core.aggregation import RewardAggregator
from openrlhf_ebft.core.anchors import StrideSettings
from openrlhf_ebft.core.experience import Reference, Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.core.losses import aggregate, on_policy_loss
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import TrainItem, count_step
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.feature_network import FeatureNetwork
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.tree_features import TreeFeatures
from openrlhf_ebft.rollouts.block_parallel import BlockParallelSampler
from tests.trees import document_anchors

VOCAB, SIZE, REFERENCES, SAMPLES, STEPS = 8, 34, 8, 8, 300
SETTINGS = StrideSettings(stride=1, context_length=2, generate_max_len=1)
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=())
CHAIN = torch.softmax(0.8 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)), -1)


def llama(kind, hidden, layers):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return kind(config).eval()


def one_hot_features():
    """A network whose block adds nothing to its embedding, which is the identity."""
    backbone = llama(LlamaModel, VOCAB, 1)
    with torch.no_grad():
        backbone.embed_tokens.weight.copy_(torch.eye(VOCAB))
        backbone.layers[0].self_attn.o_proj.weight.zero_()
        backbone.layers[0].mlp.down_proj.weight.zero_()
    config = FeatureConfig(embed_method="last_token", whitening="none")
    return TreeFeatures(FeatureNetwork(backbone, [1], 1), config, special_ids=(), mode="split")


def chain_references(number):
    generator = torch.Generator().manual_seed(1000 + number)
    references = []
    for row in range(REFERENCES):
        tokens = [0]
        while len(tokens) < SIZE:
            tokens.append(int(torch.multinomial(CHAIN[tokens[-1]], 1, generator=generator)))
        anchors = document_anchors(SIZE, SETTINGS)
        windows = torch.ones_like(anchors)
        mask = torch.ones(SIZE, dtype=torch.bool)
        references.append(Reference(f"{number}-{row}", torch.tensor(tokens), anchors, windows, windows.clone(), mask))
    return references


def sample_trees(model, references, seed):
    requests = [RolloutRequest(r, num_samples=SAMPLES, seed=seed + i) for i, r in enumerate(references)]
    groups = iter(BlockParallelSampler(model).sample(requests, SAMPLING))
    return [
        RolloutTree.from_rollout(r, Rollout(r.example_id, tuple(next(groups) for _ in r.anchors), 0))
        for r in references
    ]


def rewards_of(trees, features, whitening):
    aggregator = RewardAggregator(whitening=whitening)
    aggregator.start(0, {(t.example_id, a): SAMPLES for t in trees for a in range(t.num_anchors)})
    for tree, gram in zip(trees, features.group_grams(trees), strict=True):
        aggregator.add(0, [(tree.example_id, a) for a in range(tree.num_anchors)], gram)
    return aggregator.finish(0)


def train(whitening):
    torch.manual_seed(0)
    model, features = llama(LlamaForCausalLM, 16, 1), one_hot_features()
    policy = PolicyModel(model, "split", temperature=1.0, chunk_tokens=4096, with_entropy=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    for step in range(STEPS):
        trees = sample_trees(model, chain_references(step), seed=100 * step)
        rewards = rewards_of(trees, features, whitening)
        items = [TrainItem.from_groups(tree, rewards.advantages) for tree in trees]
        batch = TreeBatch.collate(trees)
        tokens = on_policy_loss(policy(batch).branch, batch.spread([item.advantages for item in items]))
        loss = aggregate(tokens, batch.branch_of_token, count_step(trees).completions, "sequence_mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model, features


def distances(model):
    """(mean total variation to the chain, exact expected loss, its floor) over contexts that were not trained on."""
    model.set_attn_implementation("sdpa")
    ids = torch.stack([r.token_ids for number in range(5) for r in chain_references(10_000 + number)])
    with torch.no_grad():
        policy = torch.softmax(model(ids).logits[:, 1:-1], -1)
    truth = CHAIN[ids[:, 1:-1]]
    floor = 1 - truth.square().sum(-1).mean()
    loss = (policy - truth).square().sum(-1).mean() + floor
    return float((policy - truth).abs().sum(-1).mean() / 2), float(loss), float(floor)


def test_the_chain_is_learned():
    before = distances(llama(LlamaForCausalLM, 16, 1))
    model, features = train("none")
    variation, loss, floor = distances(model)
    assert before[0] > 0.3, "an untrained policy is far away"
    assert variation < 0.05
    assert loss < 1.05 * floor
    trees = sample_trees(model, [r for number in range(20) for r in chain_references(20_000 + number)], seed=7)
    sampled = rewards_of(trees, features, "none").statistics.cfm_unbiased
    assert sampled == pytest.approx(floor, rel=0.05)
