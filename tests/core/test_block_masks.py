"""Block masks of flex attention against the dense mask of the same trees."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from openrlhf_ebft.core.anchors import StrideSettings, answer_anchors
from openrlhf_ebft.core.attention import AttentionSpec, attention_masks
from openrlhf_ebft.core.block_masks import tree_block_masks, tree_mask_mod
from openrlhf_ebft.core.tree_batch import TreeBatch
from tests.trees import make_reference, make_tree

BLOCK = 128


def strided(size, documents=None, settings=StrideSettings(8, 8, 8)):  # noqa: B008 - frozen
    ids = None if documents is None else torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    anchors = answer_anchors(torch.ones(size, dtype=torch.bool), ids, settings).tolist()
    reference = make_reference(size, anchors, window=8, documents=None if ids is None else ids.tolist())
    return make_tree(reference, [[8, 3, 5]] * len(anchors))


CASES = {
    "structured": [
        make_tree(make_reference(9, [4], seed=1), [[3, 6, 1]]),
        make_tree(make_reference(30, [11]), [[9, 40]]),
    ],
    "turns": [make_tree(make_reference(40, [5, 17, 33]), [[7, 2], [12, 1], [3, 9]])],
    "strided": [strided(70), strided(48)],
    "packed": [strided(90, [30, 17, 43]), strided(64, [20, 44])],
    "one has documents": [strided(60, [25, 35]), strided(40)],
    "across documents": [
        make_tree(make_reference(20, [3, 8, 14], window=3, documents=[0] * 9 + [1] * 11), [[5, 4]] * 3)
    ],
    "anchor at the end": [make_tree(make_reference(6, [6]), [[4, 2]])],
    "no branches": [make_tree(make_reference(12, [5]), [[1]]).without_last_tokens()],
}


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CASES)
def test_mask_of_every_pair_equals_the_dense_mask(name, side, window):
    batch = TreeBatch.collate(CASES[name], padding_side=side)
    width = batch.input_ids.shape[1]
    dense = attention_masks(batch.allowed(), batch.position_ids, AttentionSpec("boolean", (("", window),)), torch.float)
    made = create_mask(tree_mask_mod(batch, window), len(batch.trees), 1, width, width, device="cpu")
    assert torch.equal(made, dense)


@pytest.mark.parametrize("name", ["strided", "packed"])
def test_blocks_without_an_allowed_pair_are_left_out(name):
    batch = TreeBatch.collate(CASES[name])
    spec = AttentionSpec("boolean", (("full_attention", None), ("sliding_attention", 6)))
    masks = tree_block_masks(batch, spec)
    dense = attention_masks(batch.allowed(), batch.position_ids, spec, torch.float)
    assert set(masks) == set(dense) == {"full_attention", "sliding_attention"}
    for kind, mask in masks.items():
        width = dense[kind].shape[-1]
        rest = -width % BLOCK
        padded = torch.nn.functional.pad(dense[kind], (0, rest, 0, rest))
        blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(4, (-1, BLOCK)).any(5).any(3)
        assert torch.equal(mask.to_dense().bool(), blocks)
        assert mask.shape == dense[kind].shape
    assert not bool(masks["full_attention"].to_dense().all()), "the case has an empty block"
    assert masks["sliding_attention"].sparsity() >= masks["full_attention"].sparsity()


def test_one_kind_of_layer_gives_one_mask():
    batch = TreeBatch.collate(CASES["turns"])
    mask = tree_block_masks(batch, AttentionSpec("boolean"))
    assert mask.shape == (1, 1, batch.input_ids.shape[1], batch.input_ids.shape[1])
