"""Whole runs with the policy's options: several updates, KL, averaged weights, a reward function, the SFT baseline."""

import re
import shutil

import pytest
from safetensors.torch import load_file

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.trainer.export import export_model
from tests.trainer import runs

ENGINE = {"engine": "transformers"}
REWARDS = """
def short(prompts, completions, ground_truths, example_ids, ground_truth):  # the last one is a column of the data
    assert len(prompts) == len(completions) == len(ground_truths) == len(example_ids)
    assert [text.strip() for text in ground_truth] == [text.strip() for text in ground_truths]
    return [-float(len(text)) for text in completions]


def broken(prompts, completions, ground_truths):
    return [1.0 / (len(prompts) - len(completions)) for _ in prompts]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    runs.write_inputs(folder)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def everything(folder):
    """One run with all options at once."""
    config = runs.write_config(
        folder,
        "everything",
        rollout=ENGINE,
        policy={
            "loss": "ppo",
            "updates_per_batch": 4,
            "mini_batches": 2,
            "dual_clip": 3.0,
            "tis_cap": 2.0,
            "kl_coef": 0.05,
            "entropy_coef": 0.001,
            "ema_decay": 0.9,
            "export_ema": True,
            "max_steps": 2,
            "sft_warmup_steps": 0,
            "micro_batch_size": 1,
        },
        optimizer={"learning_rate": 1e-3, "schedule": "cosine", "warmup_ratio": 0.25, "min_lr_ratio": 0.1},
        reward={"function": f"{folder}/rewards.py:short", "function_coef": 0.1},
        evaluation={"use_ema": True, "every_steps": 1},
        checkpoint={"every_steps": 1},
    )
    code, output = runs.run("train", str(config))
    assert code == 0, output
    return runs.read_metrics(folder, "everything")


@pytest.mark.stack
def test_everything_is_logged(everything):
    steps = [record for record in everything if record["phase"] == "ebft"]
    assert len(steps) == 2
    for record in steps:
        assert record["applied"] == 1.0 and record["updates_applied"] == 4.0
        assert record["kl"] > 0 and record["policy/update_kl"] > 0
        assert record["policy/ratio"] == pytest.approx(1.0, abs=0.2)
        assert 0 <= record["policy/clipped_share"] < 1 and 0 <= record["tis/capped_share"] < 1
        assert record["tis/ratio"] == pytest.approx(1.0, abs=1e-2)
        assert record["reward/function"] < 0
    # 8 optimizer steps, a quarter of them warm-up; the last ends at the minimum.
    assert steps[1]["learning_rate"] == pytest.approx(1e-4)


@pytest.mark.stack
def test_evaluations_are_of_the_average_and_training_is_not(folder, everything):
    evaluations = [record for record in everything if record["phase"] == "evaluation"]
    assert len(evaluations) == 3
    assert all(record["function"] < 0 for record in evaluations)
    trained = load_file(folder / "runs" / "everything" / "model" / "model.safetensors")
    averaged = load_file(folder / "runs" / "everything" / "model-ema" / "model.safetensors")
    start = load_file(folder / "model" / "model.safetensors")
    assert set(trained) == set(averaged)
    for name, value in trained.items():
        moved, behind = (value - start[name]).norm(), (averaged[name] - start[name]).norm()
        assert 0 < behind < moved, name
    assert (folder / "runs" / "everything" / "model-ema" / "tokenizer.json").is_file()
    # Sampling in training went on from the trained weights: every rollout carries their number of updates.
    versions = [record["rollout/weight_version"] for record in everything if record["phase"] == "ebft"]
    assert versions == [0.0, 4.0]


@pytest.mark.stack
def test_a_resumed_run_gives_the_same_lines_and_weights(folder, everything):
    """Stopped after the first step: schedule, average, updates and the reward function go on where they were."""
    straight, again = folder / "runs" / "everything", folder / "runs" / "again"
    shutil.copytree(straight, again)
    for name in ("checkpoints/step-2", "model", "model-ema"):
        shutil.rmtree(again / name)
    code, output = runs.run("train", "--resume", str(again))
    assert code == 0, output
    assert "resumed after step 1" in output
    assert runs.read_metrics(folder, "again") == everything
    for name in ("model", "model-ema"):
        first, second = (load_file(path / name / "model.safetensors") for path in (straight, again))
        assert all(second[key].equal(value) for key, value in first.items())


@pytest.mark.stack
def test_averaged_weights_are_exported_from_the_run_and_from_its_checkpoint(folder, everything, tmp_path):
    run = folder / "runs" / "everything"
    final = load_file(run / "model-ema" / "model.safetensors")
    for number, source in enumerate((run, run / "checkpoints" / "step-2")):
        out = tmp_path / str(number)
        export_model(source, out, merge=False, dtype=None, say=print, averaged=True)
        exported = load_file(out / "model.safetensors")
        assert all(exported[name].equal(final[name]) for name in exported)
        assert (out / "tokenizer.json").is_file()
    with pytest.raises(UserError, match="averaged weights are in run directories and checkpoints alone"):
        export_model(run / "model", tmp_path / "none", merge=False, dtype=None, say=print, averaged=True)


@pytest.mark.stack
def test_supervised_baseline_has_the_same_evaluation(folder, everything):
    config = runs.write_config(
        folder,
        "sft",
        rollout=ENGINE,
        policy={"objective": "sft", "max_steps": 2, "sft_warmup_steps": 0},
        evaluation={"every_steps": 1},
    )
    code, output = runs.run("train", str(config))
    assert code == 0, output
    assert "2 supervised steps of 4 prompts" in output
    records = runs.read_metrics(folder, "sft")
    assert [record["phase"] for record in records] == ["evaluation", "sft", "evaluation", "sft", "evaluation"]
    first, last = records[0], records[-1]
    assert last["ce"] < first["ce"]
    others = next(record for record in everything if record["phase"] == "evaluation")
    assert set(first) == set(others) - {"function"}
    assert first["ce"] == others["ce"], "both start from the same model and hold out the same rows"
    # Without evaluation there is nothing to sample: the trainer is the only actor, and trains the same.
    command = ("train", str(config), "--name", "sft-alone", "--evaluation.every_steps", "0")
    code, output = runs.run(*command, "--evaluation.max_examples", "0")
    assert code == 0, output
    assert "policy trainer is up" in output and "rollout engine" not in output and "feature network" not in output
    assert runs.read_metrics(folder, "sft-alone") == [record for record in records if record["phase"] == "sft"]
    assert not (folder / "runs" / "sft-alone" / "rollout-settings.json").exists()
    ours, theirs = (load_file(folder / "runs" / name / "model" / "model.safetensors") for name in ("sft-alone", "sft"))
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


@pytest.mark.stack
def test_a_faulty_reward_function_ends_the_run_with_its_name_and_the_example(folder):
    config = runs.write_config(
        folder,
        "broken",
        rollout=ENGINE,
        policy={"max_steps": 1, "sft_warmup_steps": 0},
        reward={"function": f"{folder}/rewards.py:broken"},
        evaluation={"max_examples": 0},
    )
    code, output = runs.run("train", str(config))
    assert code == 1
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.search("example [0-9a-f]{16}: reward function .*rewards.py:broken raised ZeroDivisionError", line)
    assert runs.read_metrics(folder, "broken") == [], "nothing is trained"


def test_a_missing_reward_function_is_found_before_anything_starts(folder):
    config = runs.write_config(folder, "no-function", reward={"function": f"{folder}/rewards.py:absent"})
    code, output = runs.run("train", str(config))
    assert code == 2
    assert "has no function 'absent'; it has ['broken', 'short']" in output
    assert not (folder / "runs" / "no-function").exists()
