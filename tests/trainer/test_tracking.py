"""Records of a run that goes back: no step twice, nothing lost before it, and why a step was skipped."""

import json
import math

import pytest

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.tracking import SkippedStep, Tracker


@pytest.fixture
def tracker(tmp_path):
    config = EBFTConfig(name="run", model={"path": "m"}, data={"path": "d"}, logging={"tensorboard": False})
    made = Tracker(tmp_path, config)
    made.log(0, "evaluation", {"ce": 3.0})
    for step in (1, 2, 3, 4):
        made.log(step, "ebft", {"loss": float(step)})
    made.log(4, "evaluation", {"ce": 2.0})
    yield made
    made.close()


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_steps_that_come_again_are_dropped_and_written_once(tmp_path, tracker):
    tracker.rewind(2)
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]
    tracker.log(3, "ebft", {"loss": 3.5})
    assert records(tmp_path)[-1] == {"step": 3, "phase": "ebft", "loss": 3.5}


@pytest.mark.parametrize(("final_too", "phases"), [(False, ["ebft", "evaluation"]), (True, ["ebft"])])
def test_an_evaluation_at_the_checkpoint_stays_unless_it_is_the_last_one(tmp_path, tracker, final_too, phases):
    tracker.rewind(4, final_too=final_too)
    assert [record["phase"] for record in records(tmp_path) if record["step"] == 4] == phases


def test_a_line_that_was_cut_off_goes(tmp_path, tracker):
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "pha')
    tracker.rewind(9)
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2, 3, 4, 4]


def test_a_skipped_step_says_why(tmp_path, tracker):
    skipped = SkippedStep("the loss is not finite", tuple(f"row-{number}" for number in range(10)))
    tracker.log(5, "ebft", {"loss": math.nan, "applied": 0.0}, skipped)
    last = records(tmp_path)[-1]
    assert last["loss"] is None and last["skipped_because"] == "the loss is not finite"
    assert last["skipped_examples"] == list(skipped.examples)
    assert str(skipped).endswith("row-6, row-7, ...")
