"""Strided runs of the real stack: packed documents, split attention, both engines, one and two of everything."""

import json

import pytest

from tests.trainer import runs

pytestmark = pytest.mark.stack

DOUBLE = {
    "features": {"num_replicas": 2},
    "deepspeed": {"zero_stage": 2},
    "placement": {"trainer_cpus": 0.25, "rollout_cpus": 0.25, "feature_cpus": 0.25},
}
TWO_RANKS = {"num_ranks": 2, "micro_batch_size": 1, "max_tokens_per_micro_batch": 150}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("strided")
    runs.write_inputs(path)
    with (path / "documents.jsonl").open("w") as file:
        for row in range(40):
            words = " ".join(runs.WORDS[(row * 5 + k * (1 + row % 4)) % len(runs.WORDS)] for k in range(3 + row % 7))
            file.write(json.dumps({"text": words}) + "\n")
    return path


def train(folder, name, **sections):
    config = runs.write_config(
        folder,
        name,
        model={"attention": "split"},
        data={
            "path": str(folder / "documents.jsonl"),
            "mode": "strided",
            "text_column": "text",
            "stride": 4,
            "context_length": 4,
            "generate_max_len": 4,
            "sequence_length": 40,
            "pack_documents": True,
        },
        **sections,
    )
    code, output = runs.run("train", str(config))
    assert code == 0, output
    return runs.read_metrics(folder, name)


@pytest.fixture(scope="module")
def single(folder):
    return train(folder, "single", rollout={"engine": "auto"})


def check(records):
    assert [record["phase"] for record in records] == ["evaluation", "sft", "sft", "ebft", "ebft", "ebft", "evaluation"]
    for record in records:
        if record["phase"] != "ebft":
            continue
        assert record["applied"] == 1.0
        assert record["sampler_mismatch"] < 1e-3, "sampler and trainer must agree about the sampled tokens"
        assert 0 < record["reward/cfm_unbiased"] < 2
        assert record["completion/length"] <= 4
    assert [record["rollout/weight_version"] for record in records[3:6]] == [2, 3, 4]


def test_one_engine_and_one_rank(folder, single):
    check(single)
    settings = json.loads((folder / "runs" / "single" / "rollout-settings.json").read_text())
    assert settings["engine/sampler"] == "block_parallel"


def test_two_transformers_engines_and_two_ranks_give_the_run_of_one(folder, single):
    records = train(folder, "double", rollout={"engine": "transformers", "num_engines": 2}, policy=TWO_RANKS, **DOUBLE)
    check(records)
    for record, expected in zip(records, single, strict=True):
        for key, value in expected.items():
            close = pytest.approx(value, abs=2e-3, rel=2e-3) if isinstance(value, float) else value
            assert record[key] == close, key


def test_two_vllm_engines_and_two_ranks(folder, single):
    rollout = {"engine": "vllm", "num_engines": 2}
    records = train(folder, "vllm", rollout=rollout, policy=TWO_RANKS, **DOUBLE)
    check(records)
    # What does not depend on the samples is that of the other engine.
    assert records[0]["ce"] == pytest.approx(single[0]["ce"], rel=1e-4)
    for record, expected in zip(records[1:3], single[1:3], strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    # And samples of the same policy look alike.
    assert records[0]["cfm_unbiased"] == pytest.approx(single[0]["cfm_unbiased"], rel=0.3)
