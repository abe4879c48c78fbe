"""What the trainer sends and what is refused before anything changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from openrlhf_ebft.distributed.weight_sync import (
    ExpectedWeights,
    TensorSpec,
    WeightSyncError,
    build_update,
    check_chunks,
    check_manifest,
    export_weights,
    fill_tied,
)
from openrlhf_ebft.rollouts.expected_weights import expected_weights
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen2

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4.0).to(torch.float64),
    "steps": torch.tensor([3]),
    "c": torch.ones(50),
}


def specs(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "float32") for name, shape in shapes.items()}


def test_chunks_keep_order_and_respect_the_size():
    chunks = list(export_weights(TENSORS.items(), chunk_bytes=44, dtype=torch.float32))
    # 24 + 16 bytes fit in 44, 8 more do not; 200 bytes are over the limit and travel alone
    assert [list(chunk) for chunk in chunks] == [["a", "b"], ["steps"], ["c"]]
    assert torch.equal(chunks[0]["a"], TENSORS["a"])
    assert chunks[0]["b"].dtype == torch.float32
    assert chunks[1]["steps"].dtype == torch.int64  # only floating tensors are cast


def test_chunks_are_copies():
    parameter = torch.nn.Parameter(torch.zeros(3))
    (chunk,) = export_weights([("w", parameter)], chunk_bytes=100, dtype=torch.float32)
    with torch.no_grad():
        parameter.add_(1)
    assert chunk["w"].tolist() == [0, 0, 0]
    assert not chunk["w"].requires_grad


def test_export_reads_one_tensor_at_a_time():
    alive = []

    def gather():
        for index in range(6):
            alive.append(index)
            yield f"w{index}", torch.zeros(4)

    chunks = export_weights(gather(), chunk_bytes=32, dtype=torch.float32)
    next(chunks)
    assert len(alive) == 3  # two filled the chunk, the third closed it


@pytest.mark.parametrize(
    ("tensors", "chunk_bytes", "message"),
    [
        ([("w", torch.zeros(1)), ("w", torch.zeros(1))], 10, "w comes twice"),
        ([], 10, "no tensors"),
        ([("w", torch.zeros(1))], 0, "chunk_bytes must be positive, got 0"),
    ],
)
def test_bad_exports(tensors, chunk_bytes, message):
    with pytest.raises(ValueError, match=message):
        list(export_weights(tensors, chunk_bytes, torch.float32))


def test_update_carries_manifest_and_handles():
    stored = []

    def store(chunk):
        stored.append(chunk)
        return len(stored) - 1

    update = build_update(7, TENSORS.items(), dtype=torch.bfloat16, chunk_bytes=30, store=store)
    assert update.version == 7
    assert update.chunks == (0, 1)
    assert [spec.name for spec in update.manifest] == list(TENSORS)
    assert update.manifest[0] == TensorSpec("a", (2, 3), "bfloat16")
    check_chunks([stored[handle] for handle in update.chunks], update.manifest)


EXPECTED = ExpectedWeights(specs(embed=(4, 2), head=(4, 2), norm=(2,)), tied=(("embed", "head"),))


@pytest.mark.parametrize("names", [("embed", "head", "norm"), ("embed", "norm"), ("norm", "head")])
def test_manifest_with_any_member_of_a_tied_group_is_complete(names):
    check_manifest([EXPECTED.specs[name] for name in names], EXPECTED)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (specs(embed=(4, 2)), r"old weights stay: missing: norm \[2\] float32$"),
        (specs(norm=(2,)), r"missing: embed \[4, 2\] float32; missing: head"),
        (specs(embed=(4, 2), norm=(2,), extra=(1,)), r"unknown: extra \[1\] float32"),
        (specs(embed=(4, 3), norm=(2,)), r"embed: got \[4, 3\] float32, expected \[4, 2\] float32"),
    ],
)
def test_bad_manifests(manifest, message):
    with pytest.raises(WeightSyncError, match=message):
        check_manifest(list(manifest.values()), EXPECTED)


def test_manifest_with_wrong_dtype_or_repeated_names():
    good = [EXPECTED.specs["embed"], EXPECTED.specs["norm"]]
    with pytest.raises(WeightSyncError, match=r"norm: got \[2\] bfloat16, expected \[2\] float32"):
        check_manifest([good[0], dataclasses.replace(good[1], dtype="bfloat16")], EXPECTED)
    with pytest.raises(WeightSyncError, match="norm comes 2 times"):
        check_manifest([*good, good[1]], EXPECTED)


def test_untied_model_needs_both():
    untied = ExpectedWeights(EXPECTED.specs)
    with pytest.raises(WeightSyncError, match=r"missing: head"):
        check_manifest(list(specs(embed=(4, 2), norm=(2,)).values()), untied)


def test_long_lists_of_problems_are_cut():
    many = ExpectedWeights(specs(**{f"w{i}": (1,) for i in range(30)}))
    with pytest.raises(WeightSyncError, match="missing: w7 .*and 22 more$"):
        check_manifest([], many)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([{"a": torch.zeros(2)}], "announced but not delivered: b"),
        ([{"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(2)}], "delivered 2 times: a"),
        ([{"a": torch.zeros(2), "b": torch.zeros(1), "x": torch.zeros(1)}], "delivered but not announced: x"),
        ([{"a": torch.zeros(3), "b": torch.zeros(1)}], r"delivered a \[3\] float32, announced a \[2\] float32"),
    ],
)
def test_chunks_that_differ_from_the_manifest(chunks, message):
    with pytest.raises(WeightSyncError, match=message):
        check_chunks(chunks, list(specs(a=(2,), b=(1,)).values()))


def test_tied_names_are_filled_without_touching_the_sent_chunks():
    embed = torch.rand(4, 2)
    sent = [{"embed": embed}, {"norm": torch.ones(2)}]
    filled = fill_tied(sent, EXPECTED.tied)
    assert torch.equal(filled[1]["head"], embed)
    assert list(sent[1]) == ["norm"]
    assert [list(chunk) for chunk in fill_tied(sent, ())] == [["embed"], ["norm"]]


def test_tied_names_with_different_values_are_refused():
    chunk = {"embed": torch.zeros(4, 2), "head": torch.ones(4, 2)}
    with pytest.raises(WeightSyncError, match="head and embed are tied in the model but differ"):
        fill_tied([chunk], EXPECTED.tied)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2, tiny_gpt2])
def test_expected_weights_are_those_of_the_loaded_model(tmp_path, build):
    model = build(tmp_path)
    expected = expected_weights(str(tmp_path), torch.float32)
    update = build_update(1, model.state_dict().items(), dtype=torch.float32)
    assert set(update.manifest) == set(expected.specs.values())
    check_manifest(update.manifest, expected)
    named = build_update(1, model.named_parameters(), dtype=torch.float32)  # a tied head is absent here
    check_manifest(named.manifest, expected)
    if model.config.tie_word_embeddings:
        embedding = next(name for name, tensor in model.named_parameters() if tensor is model.lm_head.weight)
        assert [set(group) for group in expected.tied] == [{"lm_head.weight", embedding}]
    else:
        assert expected.tied == ()
