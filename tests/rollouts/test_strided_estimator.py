"""The policy gradient of strided mode, end to end, against the exact gradient of the feature-matching loss.

A tiny policy with a vocabulary of 6, two-token completions, three anchors, unit-length features, no whitening. All 36
completions of an anchor are enumerated, each run alone through a plain causal model in float64. The estimate comes
from the real sampler, tree, feature network, aggregator and loss, over 40 independent batches.
"""

import copy
import itertools

import pytest
import torch
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from openrlhf_ebft.config.sections import FeatureConfig
from openrlhf_ebft.core.aggregation import RewardAggregator
from openrlhf_ebft.core.experience import Reference, Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.core.losses import aggregate, on_policy_loss
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import TrainItem, count_step
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.feature_network import load_feature_network
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.tree_features import TreeFeatures
from openrlhf_ebft.rollouts.block_parallel import BlockParallelSampler

VOCAB, STEPS, ANCHORS, TEMPERATURE = 6, 2, (2, 4, 5), 0.8
TOKENS = torch.tensor([3, 1, 5, 0, 2, 4, 1])
BATCHES = 40
SAMPLING = SamplingSettings(temperature=TEMPERATURE, top_p=1.0, top_k=0, stop_token_ids=())


def tiny(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The policy, and the folder of the (different) feature network."""
    folder = tmp_path_factory.mktemp("features")
    tiny(1).save_pretrained(folder)
    return tiny(0), str(folder)


def reference(copies):
    """One reference whose every anchor stands there `copies` times: independent groups in one tree."""
    anchors = torch.tensor(ANCHORS).repeat_interleave(copies)
    windows = torch.full_like(anchors, STEPS)
    mask = torch.zeros(len(TOKENS), dtype=torch.bool)
    return Reference("e", TOKENS, anchors, windows, windows.clone(), mask)


def exact_gradient(models):
    """Gradient of the mean over anchors of ||E phi - phi_gt||^2 with respect to the head's weights, float64."""
    policy, folder = models[0].double(), models[1]
    network = AutoModel.from_pretrained(folder, dtype=torch.float64)
    completions = torch.tensor(list(itertools.product(range(VOCAB), repeat=STEPS)))
    losses = []
    for anchor in ANCHORS:
        rows = torch.cat([TOKENS[:anchor].expand(len(completions), -1), completions], dim=1)
        logits = policy(input_ids=rows, use_cache=False).logits[:, anchor - 1 : -1] / TEMPERATURE
        probabilities = logits.log_softmax(-1).gather(2, completions[..., None]).sum((1, 2)).exp()
        torch.testing.assert_close(probabilities.sum(), torch.ones((), dtype=torch.float64))
        truth = TOKENS[None, : anchor + STEPS]
        with torch.no_grad():
            phi, target = (
                torch.nn.functional.normalize(
                    torch.cat(network(input_ids=ids, output_hidden_states=True).hidden_states[1:3], -1)[:, -1], dim=-1
                )
                for ids in (rows, truth)
            )
        losses.append((probabilities @ phi - target[0]).square().sum())
    (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), policy.lm_head.weight)
    policy.float()
    return gradient.flatten()


def block_major(batch, advantages):
    """The fault of a public port: advantages repeated block by block over tokens that lie step by step."""
    return advantages.flatten().repeat(STEPS)


def right_layout(batch, advantages):
    return batch.spread([advantages])


@pytest.fixture(scope="module")
def grouped(models):
    """Trees and inner products of all batches, by number of samples."""
    policy, folder = models
    network = load_feature_network(folder, (0.5, 1.0), torch.float32)
    assert network.layer_indices == [1, 2]
    config = FeatureConfig(embed_method="last_token", whitening="none", max_tokens_per_batch=10**6)
    features = TreeFeatures(network, config, special_ids=(), mode="split")
    sampler = BlockParallelSampler(policy)
    made = {}

    def sample(n):
        if n not in made:
            ref = reference(copies=160 // n)
            trees = []
            for seed in range(BATCHES):
                request = RolloutRequest(ref, num_samples=n, seed=1000 * n + seed)
                rollout = Rollout("e", tuple(sampler.sample([request], SAMPLING)), 0)
                trees.append(RolloutTree.from_rollout(ref, rollout))
            made[n] = trees, features.group_grams(trees)
        return made[n]

    return sample


def estimated_gradients(models, grouped, n, estimator, spread):
    """(BATCHES, P): gradient of the loss of each batch."""
    policy = PolicyModel(copy.deepcopy(models[0]), "split", temperature=TEMPERATURE, chunk_tokens=4096)
    gradients = []
    for tree, gram in zip(*grouped(n), strict=True):
        aggregator = RewardAggregator(whitening="none", estimator=estimator)
        groups = [(tree.example_id, anchor) for anchor in range(tree.num_anchors)]
        aggregator.start(0, dict.fromkeys(groups, n))
        aggregator.add(0, groups, gram)
        item = TrainItem.from_groups(tree, aggregator.finish(0).advantages)
        batch = TreeBatch.collate([tree])
        tokens = on_policy_loss(policy(batch).branch, spread(batch, item.advantages))
        loss = aggregate(tokens, batch.branch_of_token, count_step([tree]).completions, "dr_grpo", 1)
        (gradient,) = torch.autograd.grad(loss, policy.model.lm_head.weight)
        gradients.append(gradient.flatten().double())
    return torch.stack(gradients)


def worst_error(models, grouped, n, estimator="rloo", spread=right_layout):
    """Largest distance of the mean gradient from the exact one, in its standard errors."""
    gradients = estimated_gradients(models, grouped, n, estimator, spread)
    standard_error = gradients.std(0) / BATCHES**0.5
    return float(((gradients.mean(0) - exact_gradient(models)).abs() / standard_error).max())


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rloo_follows_the_exact_gradient(models, grouped, n):
    assert worst_error(models, grouped, n) < 4


@pytest.mark.parametrize("n", [2, 4, 8])
def test_block_major_advantages_fail(models, grouped, n):
    assert worst_error(models, grouped, n, spread=block_major) > 8


@pytest.mark.parametrize(
    ("n", "estimator"), [(2, "rloo_simple"), (4, "rloo_simple"), (2, "dr_grpo"), (4, "group_norm")]
)
def test_wrong_baselines_fail(models, grouped, n, estimator):
    assert worst_error(models, grouped, n, estimator) > 6
