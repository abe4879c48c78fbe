"""The rollout tree: mask, positions and index maps against golden masks and hand-made values."""

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.core.experience import Completion, Rollout
from openrlhf_ebft.core.group_grid import GroupGrid
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.tree_batch import TreeBatch
from tests.trees import make_reference, make_tree

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_mask_and_positions_equal_the_golden_strided_masks(number):
    golden = np.load(GOLDEN / f"strided_mask_{number}.npz")
    size, steps, count = (int(golden[key]) for key in ("reference_len", "generate_len", "num_anchors"))
    anchors = [int(golden["context_length"]) + k * int(golden["stride"]) for k in range(count)]
    documents = golden["doc_ids"].tolist() if bool(golden["document_masking"]) else None
    tree = make_tree(make_reference(size, anchors, window=steps, documents=documents), [[steps]] * count)
    # The golden layout is step-major: token g of anchor k at reference_len + g * num_anchors + k.
    step_major = [size + k * steps + g for g in range(steps) for k in range(count)]
    order = torch.tensor([*range(size), *step_major])
    assert torch.equal(tree.position_ids[order], torch.from_numpy(golden["positions"]))
    assert torch.equal(tree.allowed()[order][:, order], torch.from_numpy(golden["allowed"]))


def test_index_maps_of_ragged_branches():
    tree = make_tree(make_reference(5, [2, 3]), [[2, 1], [1, 3]])
    assert len(tree) == 5 + 7
    assert tree.branch_of_token.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert tree.step_of_token.tolist() == [0, 1, 0, 0, 0, 1, 2]
    assert tree.anchor_of_token.tolist() == [2, 2, 2, 3, 3, 3, 3]
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 2, 3, 3, 4, 5]
    assert tree.predictors.tolist() == [1, 5, 1, 2, 2, 9, 10]
    assert tree.branch_indices(3).tolist() == [0, 1, 2, 9, 10, 11]
    assert tree.supervised_tokens.tolist() == [2, 3, 4]


def test_group_grid_lists_completions_then_the_ground_truth():
    tree = make_tree(make_reference(5, [2, 3]), [[2, 1], [1, 3]])
    grid = GroupGrid.of(tree, with_context=False)
    rows = [[grid.indices[anchor, row][grid.valid[anchor, row]].tolist() for row in range(3)] for anchor in range(2)]
    assert rows == [[[5, 6], [7], [2, 3, 4]], [[8], [9, 10, 11], [3, 4]]]
    assert torch.equal(grid.completion, grid.valid)
    longer = GroupGrid.of(tree, with_context=True)
    for anchor in range(2):
        for sample in range(2):
            keep = longer.valid[anchor, sample]
            assert torch.equal(longer.indices[anchor, sample][keep], tree.branch_indices(2 * anchor + sample))
        assert longer.indices[anchor, 2][longer.valid[anchor, 2]].tolist() == [0, 1, 2, 3, 4]
    assert longer.completion.sum() == grid.valid.sum()


def test_anchor_behind_the_last_token_continues_the_numbering():
    tree = make_tree(make_reference(3, [3]), [[2]])
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert tree.allowed()[3].tolist() == [True, True, True, True, False]


def test_first_token_of_a_document_is_not_supervised():
    reference = make_reference(6, [1], documents=[0, 0, 0, 1, 1, 1])
    assert RolloutTree.without_branches(reference).supervised_tokens.tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_indices_point_at_the_same_tokens_as_each_tree(side):
    trees = [
        make_tree(make_reference(4, [2], seed=3), [[2, 3]], seed=4),
        make_tree(make_reference(7, [3, 5], seed=5), [[1, 2], [4, 1]], seed=6),
    ]
    batch = TreeBatch.collate(trees, pad_token_id=0, padding_side=side)
    flat = batch.input_ids.flatten()
    expected_predictors = torch.cat([tree.token_ids[tree.predictors] for tree in trees])
    pruned = batch.without_last_tokens()
    assert torch.equal(pruned.input_ids.flatten()[batch.pruned_predictors(pruned)], expected_predictors)
    assert torch.equal(flat[batch.supervised_predictors + 1], batch.supervised_targets)
    assert batch.num_tokens == len(trees[0]) + len(trees[1])
    assert bool(batch.allowed().any(-1).all()), "no softmax row may be empty"
    values = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    lengths = torch.cat([tree.branch_lengths.flatten() for tree in trees])
    expected = torch.repeat_interleave(torch.arange(1.0, 7.0), lengths)
    assert torch.equal(batch.spread(values), expected)
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(1, 2\)"):
        batch.spread([torch.zeros(2, 1), values[1]])


def test_faulty_trees_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"1\.\.4.*\[0\]"):
        make_tree(make_reference(4, [0]), [[1]])
    with pytest.raises(ValueError, match="2 anchors.*has 1"):
        make_tree(make_reference(4, [2]), [[1], [1]])
    with pytest.raises(ValueError, match="different numbers"):
        make_tree(make_reference(4, [2, 3]), [[1, 1], [1]])
    with pytest.raises(ValueError, match="do not fit"):
        make_tree(make_reference(4, [2], window=3), [[1]])
    with pytest.raises(ValueError, match="has no token"):
        make_tree(make_reference(4, [2]), [[0]])
    reference = make_reference(4, [2])
    other = Rollout("other", ((Completion((5,), (-1.0,), "stop"),),), 0)
    with pytest.raises(ValueError, match="does not belong"):
        RolloutTree.from_rollout(reference, other)


def test_an_empty_completion_has_no_last_token():
    """An index of -1 would take the token of another completion."""
    tree = make_tree(make_reference(6, [3]), [[2, 1]])
    pruned = tree.without_last_tokens()
    assert pruned.branch_lengths.tolist() == [[1, 0]]
    with pytest.raises(ValueError, match="a completion without tokens"):
        pruned.without_last_tokens()
