"""A whole run with adapters: how they travel and whose base model embeds changes no number; what a run leaves."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.export import export_model, whole_model
from openrlhf_ebft.trainer.model_checks import read_models
from tests.trainer import runs

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    runs.write_inputs(folder)
    common = {"optimizer": {"learning_rate": 1e-2}, "checkpoint": {"every_steps": 2}, "evaluation": {"max_examples": 2}}
    variants = {
        "merged": {"lora": LORA},
        "adapter": {"lora": {**LORA, "sync": "adapter"}, "features": {"source": "policy_base"}},
    }
    for name, sections in variants.items():
        code, output = runs.run("train", str(runs.write_config(folder, name, **common, **sections)))
        assert code == 0, output
    return folder


@pytest.mark.stack
def test_how_adapters_travel_and_whose_base_embeds_changes_no_number(folder):
    merged, adapter = (runs.read_metrics(folder, name) for name in ("merged", "adapter"))
    assert len(merged) == len(adapter) == 7  # two evaluations, two supervised steps, three EBFT steps
    for left, right in zip(merged, adapter, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert right[key] == (pytest.approx(value, abs=2e-3, rel=2e-3) if isinstance(value, float) else value), key
    for record in merged + adapter:
        assert record.get("sampler_mismatch", 0.0) < 1e-3  # between the engine's log-probabilities and the trainer's
    assert sum("sampler_mismatch" in record for record in adapter) == 3
    learned = [record["ce_loss"] for record in adapter if "ce_loss" in record]
    assert learned[1] < learned[0]


@pytest.mark.stack
@pytest.mark.parametrize("source", ["runs/adapter", "runs/adapter/checkpoints/step-4", "runs/adapter/model"])
def test_export_with_merge_is_a_plain_model_with_the_same_logits(folder, tmp_path, source):
    out = tmp_path / "out"
    export_model(folder / source, out, merge=True, dtype=None, say=print)
    adapters = folder / "runs/adapter/model"
    if "step-4" in source:
        adapters = folder / source / "trainer" / "adapter"
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        start = base(input_ids=ids).logits.clone()
        right = PeftModel.from_pretrained(base, adapters)(input_ids=ids).logits
        exported = AutoModelForCausalLM.from_pretrained(out)
        assert exported.dtype == torch.float32
        assert (exported(input_ids=ids).logits - right).abs().max() < 1e-5
    assert (start - right).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(out)("hello")["input_ids"]
    assert not list(out.glob("adapter*"))


@pytest.mark.stack
def test_a_run_leaves_adapters_alone_and_generate_takes_them(folder, tmp_path):
    model = folder / "runs/adapter/model"
    assert not list(model.glob("model*.safetensors"))
    assert (model / "adapter_model.safetensors").stat().st_size < (
        folder / "model/model.safetensors"
    ).stat().st_size / 2
    code, text = runs.run("generate", str(model), "the cat", "--max-new-tokens", "3")
    assert code == 0, text
    export_model(folder / "runs/adapter", tmp_path / "copy", merge=False, dtype=None, say=print)
    assert (tmp_path / "copy/adapter_config.json").is_file()
    with whole_model(str(model), say=print) as merged:
        assert AutoModelForCausalLM.from_pretrained(merged)
    with whole_model(str(folder / "model"), say=print) as same:
        assert same == str(folder / "model")


@pytest.mark.stack
def test_a_damaged_checkpoint_is_not_exported(folder, tmp_path):
    checkpoint = folder / "runs/merged/checkpoints/step-4"
    file = checkpoint / "trainer/adapter/adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"step-4: trainer/adapter/adapter_model.safetensors has other content"):
        export_model(checkpoint, tmp_path / "out", merge=True, dtype=None, say=print)
    assert not list(tmp_path.iterdir())


def test_export_needs_a_source_and_a_free_place(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(UserError, match="taken exists: choose another --out"):
        export_model(tmp_path, tmp_path / "taken", merge=False, dtype=None, say=print)
    with pytest.raises(UserError, match="is no run directory, checkpoint, model or adapter folder"):
        export_model(tmp_path / "taken", tmp_path / "out", merge=False, dtype=None, say=print)


def test_wrong_targets_are_found_before_anything_starts(tmp_path):
    runs.write_inputs(tmp_path, rows=2)
    config = EBFTConfig(**runs.base_config(tmp_path), lora={**LORA, "targets": ["q_proj", "query"]})
    with pytest.raises(UserError, match=r"lora.targets = .*'query' is the name of no module.*modules: down_proj"):
        read_models(config)


def test_adapters_as_model_path_are_named(tmp_path):
    runs.write_inputs(tmp_path, rows=2)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    config = EBFTConfig(**{**runs.base_config(tmp_path), "model": {"path": str(adapters)}})
    with pytest.raises(UserError, match="holds adapters, not a whole model.*openrlhf-ebft export"):
        read_models(config)
