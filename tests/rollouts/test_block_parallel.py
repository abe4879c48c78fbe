"""The block-parallel sampler: every branch as if its prefix were decoded alone, whatever is sampled beside it."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from openrlhf_ebft.core.anchors import StrideSettings
from openrlhf_ebft.core.experience import Reference, Rollout, RolloutRequest
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.seeding import completion_seed
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.rollouts import block_parallel
from openrlhf_ebft.rollouts.anchor_prompts import anchor_prompts
from openrlhf_ebft.rollouts.block_parallel import BlockParallelSampler
from openrlhf_ebft.rollouts.branch_nodes import BranchNodes
from openrlhf_ebft.rollouts.node_cache import NodeCache
from openrlhf_ebft.rollouts.row_sampler import RowSampler
from openrlhf_ebft.rollouts.sampling import draw_tokens, draw_uniforms, sampler_logits
from tests.models.test_policy import FAMILIES, VOCAB, build
from tests.rollouts.requests import GREEDY, SAMPLED
from tests.trees import document_anchors

FILTERED = dataclasses.replace(SAMPLED, top_k=9, top_p=0.9, stop_token_ids=(1, 9, 20, 33))


def strided(size, *, seed, n=1, settings=StrideSettings(4, 8, 4), documents=None):  # noqa: B008 - frozen
    """Random tokens with the anchors of strided mode; `documents` gives lengths of packed documents."""
    tokens = torch.randint(3, VOCAB, (size,), generator=torch.Generator().manual_seed(seed))
    anchors = document_anchors(size, settings)
    ids = None
    if documents is not None:
        lengths = torch.tensor(documents)
        ids = torch.repeat_interleave(torch.arange(len(documents)), lengths)
        starts = lengths.cumsum(0) - lengths
        anchors = torch.cat([document_anchors(d, settings) + s for d, s in zip(documents, starts, strict=True)])
    windows = torch.full_like(anchors, settings.generate_max_len)
    mask = torch.ones(size, dtype=torch.bool)
    reference = Reference(f"e{seed}", tokens, anchors, windows, windows.clone(), mask, ids)
    return RolloutRequest(reference, num_samples=n, seed=seed)


def contexts(request):
    """Each anchor's tokens that may be seen: those of its own document."""
    reference = request.reference
    for anchor in reference.anchors.tolist():
        start = 0
        if reference.document_ids is not None:
            start = int((reference.document_ids < reference.document_ids[anchor]).sum())
        yield reference.token_ids[start:anchor].tolist()


def alone(model, request, sampling):
    """[anchor][sample] -> (tokens, log-probabilities): one prefix after the other, no cache, batch or padding."""
    groups = []
    for anchor, context in enumerate(contexts(request)):
        limit = int(request.reference.max_new_tokens[anchor])
        group = []
        for sample in range(request.num_samples):
            tokens, logprobs = list(context), []
            for uniform in draw_uniforms([completion_seed(request.seed, anchor, sample)], limit)[0]:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[:, -1]
                tokens.append(int(draw_tokens(logits, uniform[None], sampling)[0]))
                logprobs.append(float(sampler_logits(logits, sampling).log_softmax(-1)[0, tokens[-1]]))
                if tokens[-1] in sampling.stop_token_ids:
                    break
            group.append((tuple(tokens[len(context) :]), logprobs))
        groups.append(group)
    return groups


def assert_equal(groups, wanted, tolerance=2e-5):
    assert len(groups) == len(wanted)
    for group, expected in zip(groups, wanted, strict=True):
        assert [completion.token_ids for completion in group] == [tokens for tokens, _ in expected]
        for completion, (_, logprobs) in zip(group, expected, strict=True):
            assert completion.logprobs == pytest.approx(logprobs, abs=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_tokens_equal_plain_decoding_of_each_prefix(family, attention):
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("its score capping exists in eager attention only")
    model = build(family, attention)
    request = strided(32, seed=1)
    assert request.reference.anchors.tolist() == [8, 12, 16, 20, 24, 28]
    padded = strided(35, seed=1, documents=[3, 32])  # three pads on the left are a document that nobody sees
    padded.reference.token_ids[3:] = request.reference.token_ids
    padded.reference.token_ids[:3] = 0
    packed = strided(40, seed=2, documents=[13, 17, 10], settings=StrideSettings(3, 5, 4))
    groups = BlockParallelSampler(model).sample([request, padded, packed], GREEDY)
    assert model.config._attn_implementation == attention, "the model is left as it was"
    assert_equal(groups[:6], alone(model, request, GREEDY), 1e-4)
    assert_equal(groups[6:12], alone(model, request, GREEDY), 1e-4)
    assert_equal(groups[12:], alone(model, packed, GREEDY), 1e-4)


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_samples_equal_the_naive_loop_and_the_row_sampler(family, sampling):
    model = build(family, "sdpa")
    requests = [
        strided(32, seed=3, n=3),
        strided(21, seed=4, n=2, documents=[9, 12], settings=StrideSettings(2, 3, 5)),
    ]
    requests[0].reference.max_new_tokens[1] = 1
    groups = BlockParallelSampler(model).sample(requests, sampling)
    wanted = [group for request in requests for group in alone(model, request, sampling)]
    assert_equal(groups, wanted)
    stops = [c for group in groups for c in group if c.finish_reason == "stop"]
    assert all(c.token_ids[-1] in sampling.stop_token_ids for c in stops)
    assert sampling is SAMPLED or stops
    rows = RowSampler(model).sample(anchor_prompts(requests, max_model_len=64, vocab_size=VOCAB), sampling)
    assert_equal(rows, wanted)


def test_batching_does_not_change_a_sample(monkeypatch):
    model = build("llama", "sdpa")
    requests = [strided(20 + 5 * i, seed=i, n=2) for i in range(5)]
    sampler = BlockParallelSampler(model)
    together = sampler.sample(requests, SAMPLED)
    monkeypatch.setattr(block_parallel, "_MAX_OWN_TOKENS", 1)
    monkeypatch.setattr(block_parallel, "_HEAD_ROWS", 3)
    assert [list(block_parallel._batches(requests))] == [[[i] for i in range(5)]]
    apart = sampler.sample(requests, SAMPLED)
    for first, second in zip(together, apart, strict=True):
        assert [c.token_ids for c in first] == [c.token_ids for c in second]


@pytest.mark.parametrize("mode", ["sdpa", "split"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_sampler_logprobs_are_the_trainers_even_across_documents(family, mode):
    """Windows that run into the next document see what the tree's mask lets them see, step by step."""
    model = build(family, "sdpa")
    one = strided(24, seed=5, n=2, settings=StrideSettings(2, 3, 6))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([7, 10, 7]))
    requests = [replace(one, reference=replace(one.reference, document_ids=documents)), strided(30, seed=6, n=3)]
    sampling = dataclasses.replace(SAMPLED, stop_token_ids=(1, 9, 20))
    groups = iter(BlockParallelSampler(model).sample(requests, sampling))
    trees = []
    for request in requests:
        completions = tuple(next(groups) for _ in request.reference.anchors)
        trees.append(RolloutTree.from_rollout(request.reference, Rollout(request.reference.example_id, completions, 0)))
    batch = TreeBatch.collate(trees)
    with torch.no_grad():
        policy = PolicyModel(model, mode, temperature=sampling.temperature, chunk_tokens=64)(batch)
    torch.testing.assert_close(policy.branch, batch.sampler_logprobs, atol=1e-4, rtol=0)


def test_first_tokens_follow_the_distribution():
    """Chi-square of 4,000 first tokens of one anchor against the exact probabilities."""
    model = build("llama", "sdpa")
    request = strided(12, seed=7, n=4000)
    request.reference.max_new_tokens[:] = 1
    (group,) = BlockParallelSampler(model).sample([request], SAMPLED)
    with torch.no_grad():
        logits = model(input_ids=request.reference.token_ids[None, :8], use_cache=False).logits[0, -1]
    expected = torch.softmax(logits / SAMPLED.temperature, -1) * 4000
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=VOCAB)
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None].clamp(min=1e-9)])
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_references_are_not_copied_for_samples():
    """One row for each request; one for each anchor of samples that agree, as greedy ones do."""
    model = build("llama", "sdpa")
    layouts = []
    original = block_parallel.DecodingLayout

    class Recorded(original):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            layouts.append(self)

    block_parallel.DecodingLayout = Recorded
    try:
        BlockParallelSampler(model).sample([strided(32, seed=8, n=4)], GREEDY)
    finally:
        block_parallel.DecodingLayout = original
    (layout,) = layouts
    assert {tuple(key.shape) for key, _ in layout._reference.values()} == {(1, 2, 28, 8)}
    assert {tuple(key.shape) for key, _ in layout._nodes._held.values()} == {(1, 2, 6 * 3, 8)}  # the 4th is not read


def test_nodes_find_the_keys_of_the_nodes_that_they_go_on_from():
    """Two references, two heads of size one whose keys are numbers, over three steps; a copy by loops beside it."""
    cache, rows = NodeCache(), [[[], []], [[], []]]
    for parents in ([[0, 0], [0, 0]], [[0, 0, 1], [1, 0, 0]], [[2, 1], [0, 2]]):
        grid = torch.tensor(parents)
        cache.next_step(grid)
        new = torch.arange(2.0 * 2 * grid.shape[1]).view(2, 2, grid.shape[1], 1) + 100 * len(rows[0][0])
        rows = [
            [[*rows[b][p], new[b, :, r, 0].tolist()] for r, p in enumerate(of_tree)]
            for b, of_tree in enumerate(parents)
        ]
        keys, values = cache.extend(0, new, -new)
        wanted = torch.tensor(rows).permute(0, 3, 1, 2)[..., None]  # (b, R, K, V) -> (b, V, R, K, 1)
        assert torch.equal(keys, wanted) and torch.equal(values, -wanted)


def test_branches_share_a_node_as_long_as_they_agree():
    """Two requests with 2 and 1 anchors, three branches each; a branch that has ended leaves its node."""
    requests = [strided(size, seed=1, n=3, settings=StrideSettings(4, 4, 1)) for size in (9, 5)]
    starts = BranchNodes.at_anchors(requests)
    assert starts.grid(starts.anchor, fill=1).tolist() == [[4, 8], [4, 1]]
    first, node = starts.extend(torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.tensor([7, 5, 7, 5, 5, 9, 5]))
    assert node.tolist() == [1, 0, 1, 2, 2, 4, 3]
    assert first.grid(first.token, fill=-1).tolist() == [[5, 7, 5], [5, 9, -1]]
    assert first.grid(first.parent, fill=-1).tolist() == [[0, 0, 1], [0, 0, -1]]
    second, node = first.extend(torch.tensor([1, 1, 2, 4]), torch.tensor([3, 2, 2, 2]))
    assert node.tolist() == [1, 0, 2, 3]
    assert second.grid(second.parent, fill=-1).tolist() == [[1, 1, 2], [1, -1, -1]]
    assert second.grid(second.anchor, fill=1).tolist() == [[4, 4, 8], [4, 1, 1]]


def test_case_b49_shortest_contexts_and_completions():
    """One token of context, one of completion, or both: no cache is ever cropped or reused."""
    model = build("llama", "sdpa")
    for settings in (StrideSettings(1, 1, 3), StrideSettings(2, 1, 1), StrideSettings(2, 6, 1)):
        request = strided(7, seed=9, n=2, settings=settings)
        groups = BlockParallelSampler(model).sample([request], SAMPLED)
        assert_equal(groups, alone(model, request, SAMPLED))
