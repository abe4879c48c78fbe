"""Which weights of a run are complete, in which order, and what is read of them."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.rollouts.expected_weights import expected_weights
from openrlhf_ebft.serving.run_models import base_model, complete_models, read_weights, require_unchanged
from openrlhf_ebft.trainer.manifests import Manifest, write_manifest
from openrlhf_ebft.trainer.state import TrainerState
from tests.tiny_models import tiny_llama

STATES = "trainer/deepspeed/mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    return folder, tiny_llama(folder, seed=3)


@pytest.fixture
def run(tmp_path, model):
    """A run with a final model written at 200 s and checkpoints written at 100 s (step 1) and 300 s (step 2)."""
    run = tmp_path / "run"
    for step, written in ((1, 100), (2, 300)):
        checkpoint = run / "checkpoints" / f"step-{step}"
        (checkpoint / STATES).parent.mkdir(parents=True)
        tensors = {f"model.{name}": tensor + step for name, tensor in model[1].state_dict().items()}
        torch.save({"module": tensors}, checkpoint / STATES)
        sign(checkpoint)
        os.utime(checkpoint / "manifest.json", (written, written))
    shutil.copytree(model[0], run / "model")
    for path in (run / "model").iterdir():
        os.utime(path, (200, 200))
    return run


def sign(checkpoint):
    write_manifest(checkpoint, Manifest(TrainerState(), config={}, libraries={}, evaluation={}))


def sign_again(checkpoint):
    (checkpoint / "manifest.json").unlink()
    sign(checkpoint)


def names(run, said=None):
    said = [] if said is None else said
    return [model.version.split("@")[0] for model in complete_models(run, said.append)]


def test_newest_first_whatever_kind(run):
    assert names(run) == ["step-2", "model", "step-1"]
    assert names(run / "no-such-run") == []


def test_a_replaced_final_model_has_another_version(run):
    before = complete_models(run, print)[1]
    os.utime(run / "model" / "model.safetensors", (400, 400))
    after = complete_models(run, print)[0]
    assert (after.weights, after.version == before.version) == (before.weights, False)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: os.truncate(folder / STATES, 100), "has 100 bytes"),
        (lambda folder: (folder / STATES).unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "Expecting"),
        (lambda folder: (folder / "manifest.json").write_text(json.dumps({"files": {}})), "ZeRO stages 0 to 2"),
    ],
)
def test_damaged_checkpoints_are_named_and_passed_over(run, damage, word):
    damage(run / "checkpoints" / "step-2")
    said = []
    assert names(run, said) == ["model", "step-1"]
    assert len(said) == 1
    assert "step-2" in said[0]
    assert word in said[0]


def test_folders_that_are_being_written_are_not_looked_at(run):
    (run / "checkpoints" / "step-2").rename(run / "checkpoints" / "step-2.partial")
    (run / "model").rename(run / "model.partial")
    said = []
    assert names(run, said) == ["step-1"]
    assert said == []


def test_weights_of_checkpoint_and_final_model_have_the_model_s_names(run, model):
    expected = expected_weights(str(model[0]), torch.bfloat16)
    newest, final, _ = complete_models(run, print)
    for found, shift in ((newest, 2), (final, 0)):
        require_unchanged(found)
        tensors = read_weights(found, expected)
        assert set(tensors) == set(model[1].state_dict())  # the tied head too, which the final model's file leaves out
        for name, tensor in model[1].state_dict().items():
            assert torch.equal(tensors[name], (tensor + shift).bfloat16())


def test_other_content_of_the_same_size_is_noticed(run):
    path = run / "checkpoints" / "step-2" / STATES
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other content"):
        require_unchanged(complete_models(run, print)[0])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda module: module.pop("model.model.norm.weight"), "lacks 1 tensors"),
        (lambda module: module.update({"model.extra": torch.zeros(1)}), "holds extra"),
        (lambda module: module.update({"model.model.norm.weight": torch.zeros(3)}), r"shape \(3,\), served is \(64,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(run, model, change, word):
    path = run / "checkpoints" / "step-2" / STATES
    states = torch.load(path, weights_only=True)
    change(states["module"])
    torch.save(states, path)
    sign_again(path.parents[2])
    with pytest.raises(ValueError, match=word):
        read_weights(complete_models(run, print)[0], expected_weights(str(model[0]), torch.float32))


def test_pickled_code_in_a_checkpoint_is_not_run(run, model):
    path = run / "checkpoints" / "step-2" / STATES
    torch.save({"module": {}, "other": _Trap()}, path)
    sign_again(path.parents[2])
    newest = complete_models(run, print)[0]
    with pytest.raises(Exception, match=r"weights_only|Unsupported|Weights only"):
        read_weights(newest, expected_weights(str(model[0]), torch.float32))
    assert not _Trap.sprung


class _Trap:
    sprung = False

    def __reduce__(self):
        return _spring, ()


def _spring():
    _Trap.sprung = True
    return _Trap()


def test_architecture_comes_from_the_final_model_else_from_the_run_s_configuration(run, tmp_path):
    assert base_model(run) == str(run / "model")
    shutil.rmtree(run / "model")
    with pytest.raises(UserError, match=r"follow\.run = .*config\.yaml"):
        base_model(run)
    (run / "config.yaml").write_text("name: n\nmodel: {path: some/model}\ndata: {path: rows.jsonl}\n")
    assert base_model(run) == "some/model"
