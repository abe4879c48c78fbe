"""Split attention against the tree's own mask: what may be seen, and the numbers that come out."""

import dataclasses

import pytest
import torch

from openrlhf_ebft.core import branch_attention
from openrlhf_ebft.core.branch_attention import BranchBias, ScoreRule, attend_branches
from openrlhf_ebft.core.split_attention import TreeSplit
from openrlhf_ebft.core.tree_batch import TreeBatch
from tests.trees import make_reference, make_tree

DOCUMENTS = [0] * 5 + [1] * 4 + [2] * 6
TREES = {
    "one anchor": [make_tree(make_reference(6, [4]), [[3, 3]])],
    "equal branches": [make_tree(make_reference(9, [2, 5, 9], window=0), [[3, 3]] * 3)],
    "ragged": [make_tree(make_reference(9, [2, 5], window=2), [[3, 1], [2, 4]])],
    "across documents": [make_tree(make_reference(15, [2, 4, 8, 12], window=3, documents=DOCUMENTS), [[4]] * 4)],
    "several trees": [
        make_tree(make_reference(15, [2, 6], window=3, documents=DOCUMENTS, seed=1), [[4, 2], [1, 5]]),
        make_tree(make_reference(4, [3], seed=2), [[2, 2, 2]]),
        make_tree(make_reference(7, [1, 2, 7], window=0, seed=3), [[2], [6], [1]]),
    ],
}


def seen(split, window):
    """(b, T, T) bool made of the split masks, in the layout of the batch."""
    trees = len(split.inverse)
    size = split.reference.shape[1]
    steps = torch.arange(split.num_steps)
    on_reference, on_own = split.places.allowed(steps, split.num_steps, window)
    whole = torch.zeros(trees, size + split.branch.shape[1], size + split.branch.shape[1], dtype=torch.bool)
    among = split.places.reference_allowed(window)
    whole[:, :size, :size] = torch.ones(size, size).tril().bool() if among is None else among[:, 0]
    branches = split.places.anchors.shape[1]
    on_reference = on_reference.expand(trees, branches, split.num_steps, size)
    on_own = on_own.expand(trees, branches, split.num_steps, split.num_steps)
    for branch in range(branches):
        rows = slice(size + branch * split.num_steps, size + (branch + 1) * split.num_steps)
        whole[:, rows, :size] = on_reference[:, branch]
        whole[:, rows, rows] = on_own[:, branch]
    return torch.stack([whole[row][split.inverse[row]][:, split.inverse[row]] for row in range(trees)])


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_equal_the_trees(name, side, window):
    batch = TreeBatch.collate(TREES[name], padding_side=side)
    split = TreeSplit.from_batch(batch)
    wanted = batch.allowed()
    if window is not None:
        wanted &= batch.position_ids[:, :, None] - batch.position_ids[:, None, :] < window
    valid = batch.valid[:, :, None] & batch.valid[:, None, :]
    assert torch.equal(seen(split, window) & valid, wanted & valid)
    assert split.is_plain == (name in ("one anchor", "equal branches", "across documents"))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("softcap", "kept_scores"), [(None, 10**6), (None, 0), (2.0, 10**6)])
@pytest.mark.parametrize("scores_at_once", [1, 150, 10**6])
def test_output_and_gradients_equal_one_dense_softmax(name, softcap, kept_scores, scores_at_once, monkeypatch):
    """Grouped heads, float64; whatever is worked on together (one branch, some, whole trees) and whatever is kept."""
    monkeypatch.setattr(branch_attention, "_CPU_SCORES", scores_at_once)
    monkeypatch.setattr(branch_attention, "_KEPT_SCORES", kept_scores)
    batch = TreeBatch.collate(TREES[name])
    split = TreeSplit.from_batch(batch)
    trees, width = batch.input_ids.shape
    generator = torch.Generator().manual_seed(0)
    shapes = (trees, 4, width, 8), (trees, 2, width, 8), (trees, 2, width, 8), (trees, 4, width, 8)
    query, key, value, pull = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    leaves = [part.requires_grad_() for part in (query, key, value)]
    scores = query @ key.repeat_interleave(2, 1).mT * 0.7
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~batch.allowed()[:, None], -torch.inf)
    wanted = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    (_, own_query), (ref_key, own_key), (ref_value, own_value) = (split.divide(part) for part in leaves)
    masks = split.places.allowed(torch.arange(split.num_steps), split.num_steps, None)
    bias = BranchBias.of(*masks, torch.float64)
    own = [part.unflatten(2, (-1, split.num_steps)) for part in (own_key, own_value)]
    result = attend_branches(own_query, (ref_key, ref_value), tuple(own), bias, ScoreRule(0.7, None, softcap))
    got = split.join(torch.zeros(trees, 4, split.reference.shape[1], 8, dtype=torch.float64), result)
    is_branch = torch.zeros(trees, 1, width, 1, dtype=torch.bool)
    for row, tree in enumerate(batch.trees):
        is_branch[row, :, tree.num_reference_tokens : len(tree)] = True
    torch.testing.assert_close(got * is_branch, wanted * is_branch, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad((made * pull * is_branch).sum(), leaves) for made in (got, wanted)]
    for ours, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, dense, atol=1e-12, rtol=0)


@pytest.mark.parametrize("scores_at_once", [1, 100, 10**6])
def test_tokens_without_keys_of_their_own_attend_causally(scores_at_once, monkeypatch):
    """Every reference token as a branch of one step: equal to PyTorch's own causal attention, gradients too."""
    monkeypatch.setattr(branch_attention, "_CPU_SCORES", scores_at_once)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 11, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    key, value = (torch.randn(2, 3, 11, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in "kv")
    bias = BranchBias.of(torch.ones(11, 11).tril().bool()[None, :, None], torch.ones(1, 1, 1, 0).bool(), torch.float64)
    assert bias.reach == [list(range(1, 12))]
    ours = attend_branches(query, (key, value), None, bias, ScoreRule(0.5, None, None))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(made.square().sum(), [query, key, value]) for made in (ours, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", TREES)
def test_divide_and_join_are_inverse(name):
    batch = TreeBatch.collate(TREES[name], padding_side="left")
    split = TreeSplit.from_batch(batch)
    states = torch.randn(*batch.input_ids.shape, 2, 3).transpose(1, 2)
    joined = split.join(*split.divide(states))
    valid = batch.valid[:, None, :, None].expand_as(states)
    assert torch.equal(joined[valid], states[valid])


def test_no_token_is_taken_where_there_are_no_branches():
    tree = TREES["one anchor"][0]
    split = TreeSplit.from_batch(TreeBatch.collate([tree]))
    nothing = dataclasses.replace(split, branch=split.branch[:, :0], is_plain=False)
    taken = nothing.divide(torch.randn(1, 2, len(tree), 3))[1]
    assert taken.shape == (1, 2, 0, 3)


def test_masks_of_long_documents_build_in_milliseconds():
    """S = 2048, stride 8, n = 4: index tensors and the bias of 8,160 branch tokens."""
    import time

    anchors = list(range(8, 2041, 8))
    tree = make_tree(make_reference(2048, anchors, window=8), [[8] * 4] * len(anchors))
    batch = TreeBatch.collate([tree])
    times = []
    for _ in range(5):
        start = time.process_time()
        split = TreeSplit.from_batch(batch)
        masks = split.places.allowed(torch.arange(8), 8, None)
        times.append(time.process_time() - start)
    assert masks[0].shape == (1, len(anchors) * 4, 1, 2048) and masks[1].shape == (1, 1, 8, 8)
    assert min(times) < 0.05
