"""How a step's trees are dealt out: over ranks by size, over passes by number or by tokens."""

import random

import pytest

from openrlhf_ebft.core.step_batch import deal_passes, split_by_load


def padded(items, sizes):
    return len(items) * max(sizes[item] for item in items)


def test_passes_by_number_follow_the_loads():
    sizes = [9, 4, 7, 1, 6]
    assert split_by_load(sizes, 2) == [[0, 1, 3], [2, 4]]
    assert deal_passes(sizes, 2, micro_batch_size=2) == [[[0, 1], [3]], [[2, 4], []]]
    assert deal_passes(sizes, 1, micro_batch_size=8) == [[[0, 1, 2, 3, 4]]]


def test_passes_by_tokens_hold_trees_of_like_size():
    """24 is alone, since 2 x 24 is above 40; 20 and 18 make 40; 12 is left."""
    assert deal_passes([18, 20, 12, 24], 1, micro_batch_size=1, max_tokens=40) == [[[0, 1], [3], [2]]]


def test_a_tree_above_the_limit_is_a_pass_of_its_own():
    assert deal_passes([5, 90, 5], 1, micro_batch_size=1, max_tokens=10) == [[[1], [0, 2]]]
    assert deal_passes([5, 6], 1, micro_batch_size=1, max_tokens=1) == [[[1], [0]]]


def test_empty_places_are_used_before_a_rank_idles():
    """Everything fits one pass, but two ranks are there; three passes on two ranks have room for a fourth."""
    assert deal_passes([8, 8, 8, 8], 2, micro_batch_size=1, max_tokens=100) == [[[0, 1]], [[2, 3]]]
    dealt = deal_passes([18, 20, 12, 24], 2, micro_batch_size=1, max_tokens=45)
    assert [len(passes) for passes in dealt] == [2, 2]
    assert all(len(items) == 1 for passes in dealt for items in passes)
    assert deal_passes([7], 3, micro_batch_size=1, max_tokens=100) == [[[0]], [[]], [[]]]


@pytest.mark.parametrize("seed", range(20))
def test_every_tree_once_under_the_limit_on_balanced_ranks(seed):
    random.seed(seed)
    sizes = [random.randint(1, 60) for _ in range(random.randint(1, 40))]
    ranks, limit = random.randint(1, 5), random.randint(20, 200)
    dealt = deal_passes(sizes, ranks, micro_batch_size=1, max_tokens=limit)
    passes = [items for own in dealt for items in own]
    assert sorted(item for items in passes for item in items) == list(range(len(sizes)))
    assert len({len(own) for own in dealt}) == 1, "every rank runs the same number of passes"
    for items in filter(None, passes):
        assert padded(items, sizes) <= limit or len(items) == 1
        assert items == sorted(items)
    full = [items for items in passes if items]
    if any(len(items) > 1 for items in full):
        assert len(full) == len(passes), "no rank waits while another could give a tree"
    loads = [sum(padded(items, sizes) for items in own if items) for own in dealt]
    assert max(loads) - min(loads) <= max(padded(items, sizes) for items in full)
