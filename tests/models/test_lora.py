"""Adapters inside models of every family: off, merged, saved, refused; the base model never changes."""

import copy
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openrlhf_ebft.config.lora import LoRAConfig
from openrlhf_ebft.models.lora import (
    add_adapters,
    find_targets,
    is_adapter_folder,
    load_merged,
    save_adapters,
)
from tests.models.families import CONFIGS, build, padded_batch

FAMILIES = [name for name in CONFIGS if name != "mixtral"]


def family(name, *, tied):
    config = copy.deepcopy(CONFIGS[name])
    config.tie_word_embeddings = tied
    return build(AutoModelForCausalLM, config)


def logits(model):
    ids, mask = padded_batch("right")
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits.double()


def move(adapters):
    generator = torch.Generator().manual_seed(5)
    for _, parameter in adapters.named_parameters():
        parameter.data.normal_(std=0.05, generator=generator)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [*FAMILIES, "mixtral"])
@pytest.mark.parametrize("rslora", [True, False])
def test_off_merged_and_loaded_from_a_folder(tmp_path, name, tied, rslora):
    model = family(name, tied=tied)
    model.save_pretrained(tmp_path / "base")
    base, before = logits(model), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    adapters = add_adapters(model, LoRAConfig(rank=3, alpha=6, rslora=rslora), seed=1)
    assert torch.equal(logits(model), base)
    assert {key for key, p in model.named_parameters() if p.requires_grad} == {
        key for key in dict(model.named_parameters()) if ".lora_" in key
    }
    move(adapters)
    adapted = logits(model)
    assert (adapted - base).abs().max() > 0.05
    for _ in range(10):
        merged = {key: adapters.merge(key, weight, f) if f else weight for key, weight, f in adapters.base_parameters()}
    plain = family(name, tied=tied)
    assert set(merged) == {key for key, _ in plain.named_parameters(remove_duplicate=False)}
    plain.load_state_dict(merged, strict=False)
    assert (logits(plain) - adapted).abs().max() < 1e-5
    with adapters.disabled():
        assert torch.equal(logits(model), base)
    for key, weight, _ in adapters.base_parameters():
        assert torch.equal(weight, before[key])
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_adapters(folder, adapters.config, dict(adapters.named_parameters()), str(tmp_path / "base"))
    assert is_adapter_folder(folder) and not is_adapter_folder(tmp_path / "base")
    by_peft = PeftModel.from_pretrained(family(name, tied=tied), folder).eval()
    assert (logits(by_peft) - adapted).abs().max() < 1e-6
    assert (logits(load_merged(folder, dtype=torch.float32).eval()) - adapted).abs().max() < 1e-5


def test_merged_weight_is_the_closed_form_of_the_definition():
    """GPT-2 keeps weights transposed, (in, out); others (out, in)."""
    for name, weight_name, transposed in (
        ("gpt2", "transformer.h.0.attn.c_attn.weight", True),
        ("llama", "model.layers.1.mlp.down_proj.weight", False),
    ):
        adapters = add_adapters(family(name, tied=True), LoRAConfig(rank=4, alpha=6, rslora=True), seed=0)
        move(adapters)
        weight, factors = {key: (w, f) for key, w, f in adapters.base_parameters()}[weight_name]
        down, up = (factor.double() for factor in factors)
        change = 6 / 4**0.5 * (up @ down)
        right = weight.double() + (change.T if transposed else change)
        torch.testing.assert_close(adapters.merge(weight_name, weight, factors).double(), right, atol=1e-6, rtol=0)


def test_merging_rounds_once_from_float32():
    """In bfloat16 the sum is made in float32: a change too small for the factors' product in bfloat16 is not lost."""
    adapters = add_adapters(family("llama", tied=True).to(torch.bfloat16), LoRAConfig(rank=4, alpha=4), seed=0)
    move(adapters)
    name, weight, factors = next((k, w, f) for k, w, f in adapters.base_parameters() if f)
    assert factors[0].dtype == torch.bfloat16
    exact = weight.double() + factors[1].double() @ factors[0].double()
    merged = adapters.merge(name, weight, factors)
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, exact.float().to(torch.bfloat16))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_alone_decides_the_initial_values(seed):
    torch.manual_seed(seed)  # the state of the process must not matter, nor be touched
    state = torch.get_rng_state()
    first = add_adapters(family("llama", tied=True), LoRAConfig(rank=2), seed=4)
    torch.set_rng_state(state)
    torch.rand(seed)
    second = add_adapters(family("llama", tied=True), LoRAConfig(rank=2), seed=4)
    third = add_adapters(family("llama", tied=True), LoRAConfig(rank=2), seed=5)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), second.named_parameters(), third.named_parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (".lora_B." in name)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_porj"], "'q_porj' is the name of no module of LlamaForCausalLM; its linear modules: down_proj, gate_proj"),
        (["proj"], "'proj' is the name of no module"),
        (["q_proj", "embed_tokens"], r"'embed_tokens' is no linear module: model.embed_tokens \(Embedding\)"),
        (["mlp"], r"'mlp' is no linear module: model.layers.0.mlp \(LlamaMLP\)"),
        (["lm_head"], "'lm_head' is the output head.*tied"),
        (["all-linear", "lm_head"], "'lm_head' is the output head.*tied"),
    ],
)
def test_wrong_targets_are_named_with_those_that_exist(targets, message):
    with pytest.raises(ValueError, match=message):
        find_targets(family("llama", tied=True), targets)


def test_targets():
    model = family("llama", tied=False)
    assert find_targets(model, ["q_proj", "layers.1.mlp.up_proj", "lm_head"]) == [
        "q_proj",
        "layers.1.mlp.up_proj",
        "lm_head",
    ]
    assert "lm_head" not in find_targets(model, ["all-linear"])
    assert "lm_head" in find_targets(model, ["all-linear", "lm_head"])
    assert find_targets(family("gpt2", tied=True), ["all-linear"]) == ["c_attn", "c_fc", "c_proj"]


def test_adapted_untied_head_is_merged():
    model = family("llama", tied=False)
    adapters = add_adapters(model, LoRAConfig(rank=2, targets=["lm_head", "q_proj"]), seed=0)
    move(adapters)
    merged = {key: adapters.merge(key, weight, f) if f else weight for key, weight, f in adapters.base_parameters()}
    plain = family("llama", tied=False)
    plain.load_state_dict(merged)
    assert (logits(plain) - logits(model)).abs().max() < 1e-5


@pytest.fixture
def folder(tmp_path):
    model = family("llama", tied=True)
    model.save_pretrained(tmp_path / "base")
    adapters = add_adapters(model, LoRAConfig(rank=2), seed=0)
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_adapters(folder, adapters.config, dict(adapters.named_parameters()), str(tmp_path / "base"))
    return folder


def test_adapters_that_do_not_fit_are_refused(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("base_model.model.model.layers.3.mlp.up_proj.lora_A.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"do not fit .*base: 1 tensors differ, first .*up_proj.lora_A.weight: "):
        load_merged(folder, dtype=torch.float32)
    save_file(tensors | {"base_model.model.model.layers.3.mlp.up_proj.lora_A.weight": lost[:, :-1].contiguous()}, file)
    with pytest.raises(ValueError, match=r"the file has \(2, 31\), the model needs \(2, 32\)"):
        load_merged(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_dora": True}, ValueError, "its adapters use use_dora; only plain LoRA can be merged"),
        ({"bias": "all"}, ValueError, "its adapters use bias"),
        ({"base_model_name_or_path": "/nowhere/model"}, FileNotFoundError, "base model of these adapters is not there"),
    ],
)
def test_adapters_that_cannot_be_merged(folder, changes, error, message):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(error, match=message):
        load_merged(folder, dtype=torch.float32)
