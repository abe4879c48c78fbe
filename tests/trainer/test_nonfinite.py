"""Numbers that go wrong for real: weights that hold an infinity for one token, so that only some examples meet it."""

import json

import pytest
from transformers import AutoModelForCausalLM

from tests.trainer import runs

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs of which every seventh has a `7`, and a model `bad` in which that token's embedding is infinite."""
    path = tmp_path_factory.mktemp("nonfinite")
    runs.write_inputs(path, rows=20)
    rows = runs.write_infinite_token(path, path / "pairs.jsonl")
    (path / "sevens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::7]) * 4)
    assert AutoModelForCausalLM.from_pretrained(path / "bad").model.embed_tokens.weight.isinf().any()
    return path


def settings(**policy):
    return {
        "rollout": {"engine": "transformers", "max_new_tokens": 2, "min_length_limit": 1},
        "policy": {"prompts_per_step": 2, "micro_batch_size": 1, "sft_warmup_steps": 0, "epochs": 1, **policy},
        "data": {"heldout_fraction": 0.0},
        "evaluation": {"max_examples": 0},
    }


def check_skipped(records, reason):
    """Three examples have the token: the steps that hold them changed nothing, and say why; the others went on."""
    skipped = [record for record in records if record["applied"] == 0]
    assert 1 <= len(skipped) < len(records)
    examples = [example for record in skipped for example in record["skipped_examples"]]
    assert len(examples) == len(set(examples)) and all(record["skipped_because"] == reason for record in skipped)
    assert records[-1]["nonfinite_steps"] == len(skipped)
    return examples


def test_features_that_are_not_finite_cost_their_step_and_no_more(folder):
    options = settings(max_steps=10, max_nonfinite_steps=10) | {"features": {"path": str(folder / "bad")}}
    code, output = runs.run("train", str(runs.write_config(folder, "features", **options)))
    assert code == 0, output
    records = runs.read_metrics(folder, "features")
    assert [record["step"] for record in records] == list(range(1, 11))
    # The sampler may draw the token, too, so that more than the three rows are concerned.
    assert len(check_skipped(records, "features are not finite")) >= 3
    versions = [record["rollout/weight_version"] for record in records]
    applied = [record["applied"] for record in records]
    assert versions == [sum(applied[:number]) for number in range(10)], "a skipped step must not change the weights"
    assert "changed nothing: features are not finite, examples " in output


def test_a_loss_that_is_not_finite_costs_its_step_and_names_the_examples(folder):
    options = settings(max_steps=0, sft_warmup_steps=10) | {"model": {"path": str(folder / "bad")}}
    code, output = runs.run("train", str(runs.write_config(folder, "loss", **options)))
    assert code == 0, output
    names = check_skipped(runs.read_metrics(folder, "loss"), "the loss is not finite")
    assert len(names) == 3
    assert all(f"examples {name}" in output or f", {name}" in output for name in names)
    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "loss" / "model")
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_too_many_in_a_row_stop_the_run_at_its_last_good_checkpoint(folder):
    options = settings(max_steps=8) | {
        "features": {"path": str(folder / "bad")},
        "data": {"path": str(folder / "sevens.jsonl"), "heldout_fraction": 0.0},
        "checkpoint": {"every_steps": 2},
    }
    code, output = runs.run("train", str(runs.write_config(folder, "many", **options)))
    assert code == 1, output
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "3 steps in a row were not finite (policy.max_nonfinite_steps)" in message
    assert f"the last good checkpoint is {folder / 'runs' / 'many' / 'checkpoints' / 'step-2'}" in message
    assert "Traceback" not in output
