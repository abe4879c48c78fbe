"""Numbers that go wrong for real: weights that hold an infinity for one token, so that only some examples meet it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer import runs

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs of which every seventh has a `7`, and a model `bad` in which that token's embedding is infinite.

    Others have an `8`, whose embedding is so short there that its norm scales gradients by 1e22: out of float32, while
    the loss stays a number.
    """
    path = tmp_path_factory.mktemp("nonfinite")
    runs.write_inputs(path, rows=20)
    rows = runs.write_infinite_token(path, path / "pairs.jsonl")
    (path / "sevens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::7]) * 4)
    for row in rows[3::7]:
        row["ground_truth"] += " 8"
    (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = AutoModelForCausalLM.from_pretrained(path / "bad")
    assert model.model.embed_tokens.weight.isinf().any()
    model.config.rms_norm_eps = 0.0
    with torch.no_grad():
        model.model.embed_tokens.weight[AutoTokenizer.from_pretrained(path / "bad")("8")["input_ids"][0]] = 1e-22
    model.save_pretrained(path / "bad")
    return path


def settings(**policy):
    return {
        "rollout": {"engine": "transformers", "max_new_tokens": 2, "min_length_limit": 1},
        "policy": {"prompts_per_step": 2, "micro_batch_size": 1, "sft_warmup_steps": 0, "epochs": 1, **policy},
        "data": {"heldout_fraction": 0.0},
        "evaluation": {"max_examples": 0},
    }


def check_skipped(records, *reasons):
    """Three examples have a token: the steps that hold them changed nothing, and say why; the others went on.

    Returns the examples named, by reason.
    """
    skipped = [record for record in records if record["applied"] == 0]
    assert 1 <= len(skipped) < len(records)
    named = {reason: [] for reason in reasons}
    for record in skipped:
        named[record["skipped_because"]] += record["skipped_examples"]
    assert all(len(examples) == len(set(examples)) for examples in named.values())
    assert records[-1]["nonfinite_steps"] == len(skipped)
    return named


def test_features_that_are_not_finite_cost_their_step_and_no_more(folder):
    options = settings(max_steps=10, max_nonfinite_steps=10) | {"features": {"path": str(folder / "bad")}}
    code, output = runs.run("train", str(runs.write_config(folder, "features", **options)))
    assert code == 0, output
    records = runs.read_metrics(folder, "features")
    assert [record["step"] for record in records] == list(range(1, 11))
    # The sampler may draw the token, too, so that more than the three rows are concerned.
    assert len(check_skipped(records, "features are not finite")["features are not finite"]) >= 3
    versions = [record["rollout/weight_version"] for record in records]
    applied = [record["applied"] for record in records]
    assert versions == [sum(applied[:number]) for number in range(10)], "a skipped step must not change the weights"
    assert "changed nothing: features are not finite, examples " in output


def test_a_loss_or_a_gradient_that_is_not_finite_costs_its_step_and_names_the_examples(folder):
    """A loss names its own examples, a gradient that overflowed all of its batch."""
    options = settings(max_steps=0, sft_warmup_steps=10, max_nonfinite_steps=10)
    options |= {"model": {"path": str(folder / "bad")}}
    code, output = runs.run("train", str(runs.write_config(folder, "loss", **options)))
    assert code == 0, output
    records = runs.read_metrics(folder, "loss")
    loss, gradient = "the loss is not finite", "the gradient is not finite"
    names, batches = check_skipped(records, loss, gradient).values()
    assert len(names) == 3
    assert batches and len(batches) % 2 == 0
    for record in records:
        because = record.get("skipped_because")
        assert (record["loss"] is None) == (because == loss) and (record["grad_norm"] is None) == (because is not None)
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
