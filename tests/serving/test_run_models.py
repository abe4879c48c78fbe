"""Which weights of a run are complete, in which order, and what is read of them."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.lora import LoRAConfig
from openrlhf_ebft.models.lora import add_adapters, save_adapters
from openrlhf_ebft.rollouts.expected_weights import expected_weights
from openrlhf_ebft.serving.run_models import (
    base_model,
    complete_models,
    read_weights,
    require_followable,
    require_unchanged,
)
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
        (lambda folder: (folder / "manifest.json").write_text(json.dumps({"files": {}})), "ZeRO stage 3"),
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


def adapt(folder, model, tmp_path):
    """Writes random adapters into `folder`; returns the weights W + s B A, computed by peft's own merge."""
    adapted = tiny_llama(tmp_path / "again", seed=3)
    adapters = add_adapters(adapted, LoRAConfig(rank=2, alpha=4), seed=0)
    torch.manual_seed(9)
    for _, parameter in adapters.named_parameters():
        parameter.data.normal_(std=0.2)
    folder.mkdir(parents=True)
    save_adapters(folder, adapters.config, dict(adapters.named_parameters()), str(model[0]))
    for part in adapted.modules():
        if hasattr(part, "lora_A"):
            part.merge()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in adapted.state_dict().items()}


@pytest.mark.parametrize("place", ["model", "checkpoints/step-7/trainer/adapter"])
def test_adapters_are_merged_into_their_base_model(tmp_path, model, place):
    run = tmp_path / "lora"
    wanted = adapt(run / place, model, tmp_path)
    (run / "config.yaml").write_text(
        f"name: n\nmodel: {{path: {model[0]}}}\ndata: {{path: rows.jsonl}}\nlora: {{rank: 2}}\n"
    )
    if place != "model":
        sign(run / "checkpoints" / "step-7")
    require_followable(run)
    assert base_model(run) == str(model[0])
    (found,) = complete_models(run, print)
    require_unchanged(found)
    tensors = read_weights(found, expected_weights(str(model[0]), torch.float32))
    assert set(tensors) == set(model[1].state_dict())
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, wanted[name], atol=1e-6), name
    changed = [name for name, tensor in model[1].state_dict().items() if not torch.allclose(tensors[name], tensor)]
    assert len(changed) > 8
    if place != "model":
        file = next((run / place).glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(ValueError, match="other content"):
            require_unchanged(found)


def test_a_run_whose_checkpoints_never_hold_whole_weights_is_refused(tmp_path, model):
    run = tmp_path / "zero3"
    with pytest.raises(UserError, match="no run directory"):
        require_followable(run)
    run.mkdir()
    text = f"name: n\nmodel: {{path: {model[0]}}}\ndata: {{path: rows.jsonl}}\ndeepspeed: {{zero_stage: 3}}\n"
    (run / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"follow\.run = .*deepspeed\.zero_stage = 3 .*no final model yet"):
        require_followable(run)
    shutil.copytree(model[0], run / "model")
    require_followable(run)
