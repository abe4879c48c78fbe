"""Anchor positions: closed formula, prompts, answers, documents."""

import time

import pytest
import torch

from openrlhf_ebft.core.anchors import StrideSettings, answer_anchors
from openrlhf_ebft.core.group_grid import GroupGrid
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.split_attention import TreeSplit
from openrlhf_ebft.core.tree_batch import TreeBatch
from tests.trees import document_anchors, make_reference, make_tree

B41 = StrideSettings(stride=4, context_length=8, generate_max_len=4)


@pytest.mark.parametrize(("tokens", "count"), [(32, 6), (33, 6), (36, 7), (12, 1), (11, 0), (1, 0)])
def test_case_b41_number_of_anchors(tokens, count):
    anchors = document_anchors(tokens, B41)
    assert anchors.tolist() == [8 + 4 * k for k in range(count)]
    assert anchors.dtype == torch.int64


def test_case_b41_positions_and_targets():
    anchors = document_anchors(32, B41).tolist()
    reference = make_reference(32, anchors, window=4)
    tree = make_tree(reference, [[4]] * len(anchors))
    assert tree.position_ids[32:].tolist() == [8 + 4 * b + s for b in range(6) for s in range(4)]
    targets = [[int(i) for i in row] for row in GroupGrid.of(tree, with_context=False).indices[:, -1]]
    assert targets == [list(range(a, a + 4)) for a in (8, 12, 16, 20, 24, 28)]


@pytest.mark.parametrize("tokens", range(1, 60))
@pytest.mark.parametrize(("stride", "context", "window"), [(1, 1, 1), (8, 8, 8), (3, 5, 2), (7, 2, 9)])
def test_count_is_the_closed_formula(tokens, stride, context, window):
    anchors = document_anchors(tokens, StrideSettings(stride, context, window))
    assert anchors.numel() == max(0, (tokens - window - context) // stride + 1)
    assert anchors.tolist() == [context + k * stride for k in range(anchors.numel())]


@pytest.mark.parametrize(
    ("prompt", "prefix", "first"), [(0, 0, 8), (5, 0, 8), (8, 0, 8), (10, 0, 10), (10, 3, 13), (2, 3, 8), (28, 0, 28)]
)
def test_anchors_start_behind_prompt_and_prefix(prompt, prefix, first):
    settings = StrideSettings(4, 8, 4, min_completion_prefix=prefix)
    anchors = document_anchors(32, settings, prompt=prompt).tolist()
    assert anchors == list(range(first, 29, 4))
    assert document_anchors(32, settings, prompt=29).tolist() == []


def test_each_document_has_the_anchors_that_it_would_have_alone():
    lengths, settings = [20, 9, 33, 12], StrideSettings(3, 5, 4, min_completion_prefix=1)
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(length, generator=generator) < 0.8 for length in lengths]
    alone, offset = [], 0
    for mask in masks:
        alone += (answer_anchors(mask, None, settings) + offset).tolist()
        offset += len(mask)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    assert answer_anchors(torch.cat(masks), documents, settings).tolist() == alone
    full = [torch.ones(length, dtype=torch.bool) for length in lengths]
    together = answer_anchors(torch.cat(full), documents, settings)
    for anchor in together.tolist():
        assert documents[anchor - 5] == documents[anchor + 3], "context and window lie in one document"


def test_windows_stay_inside_their_answer():
    mask = torch.zeros(40, dtype=torch.bool)
    mask[10:19] = mask[25:33] = True
    assert answer_anchors(mask, None, StrideSettings(2, 4, 5)).tolist() == [10, 12, 14, 25, 27]
    assert answer_anchors(mask, None, StrideSettings(2, 4, 5, min_completion_prefix=3)).tolist() == [13, 28]
    assert answer_anchors(torch.zeros(40, dtype=torch.bool), None, StrideSettings(2, 4, 5)).tolist() == []


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        StrideSettings(0, 8, 8)
    with pytest.raises(ValueError, match="min_completion_prefix must be at least 0, got -1"):
        StrideSettings(8, 8, 8, -1)
    with pytest.raises(ValueError, match="3 document ids for an answer mask of 4"):
        answer_anchors(torch.ones(4, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), B41)


def test_long_references_build_fast():
    """S = 2048, stride 8, n = 4, 8,000 branch tokens: milliseconds, and 0.05 s for a mask of 104 million pairs."""
    anchors = document_anchors(2048, StrideSettings(8, 8, 8))
    tree = make_tree(make_reference(2048, anchors.tolist(), window=8), [[8] * 4] * len(anchors))
    layout, mask = [], []
    for _ in range(3):
        fresh = RolloutTree(tree.reference, tree.branch_tokens, tree.branch_lengths, tree.sampler_logprobs)
        start = time.thread_time()
        split = TreeSplit.from_batch(TreeBatch.collate([fresh]))
        reference, own = split.places.allowed(torch.arange(8), 8, None)
        layout.append(time.thread_time() - start)
        assert fresh.position_ids.numel() == fresh.predictors.numel() + 2048 == 2048 + 255 * 4 * 8
        assert (reference.shape, own.shape) == ((1, 255 * 4, 1, 2048), (1, 1, 8, 8))
        start = time.thread_time()
        allowed = fresh.allowed()
        mask.append(time.thread_time() - start)
    assert int(allowed.sum()) == 2048 * 2049 // 2 + 4 * (8 * int(anchors.sum()) + 255 * 36)
    assert min(layout) < 0.03
    assert min(mask) < 0.3
