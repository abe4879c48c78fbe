"""Feature networks: equal to the whole model's states, with only the needed blocks read and held."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    T5Config,
)

from openrlhf_ebft.models import partial_checkpoint
from openrlhf_ebft.models.feature_network import layer_index, load_feature_network
from openrlhf_ebft.models.hidden_states import extract_hidden_states
from tests.models.families import BERT, CONFIGS, LAYERS, build, padded_batch
from tests.tiny_gguf import write_llama_gguf

FRACTIONS = (0.25, 0.5, 0.75)
MIXED_LAYERS = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LOADABLE = {
    **CONFIGS,
    "gemma3": Gemma3TextConfig(**MIXED_LAYERS),
    "gpt_oss": GptOssConfig(**MIXED_LAYERS, num_local_experts=2, num_experts_per_tok=1),
}


@pytest.fixture(params=LOADABLE)
def family(request):
    return request.param


def deep_llama(layers: int = 12):
    return build(AutoModelForCausalLM, LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": layers}))


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_equals_the_whole_model(family, auto_class, tmp_path):
    model = build(auto_class, LOADABLE[family])
    model.save_pretrained(tmp_path)
    attention = "eager" if family == "gpt_oss" else "sdpa"  # transformers has no other one for it on the CPU
    network = load_feature_network(str(tmp_path), FRACTIONS, torch.float32, attention=attention)
    assert network.layer_indices == [1, 2, 3]
    assert network.is_causal
    ids, mask = padded_batch("right")
    right = extract_hidden_states(model, ids, mask, [1, 2, 3])
    torch.testing.assert_close(network(ids, mask), right, atol=1e-5, rtol=1e-5)


def test_full_depth_includes_the_final_norm(tmp_path):
    model = deep_llama(4)
    model.save_pretrained(tmp_path)
    network = load_feature_network(str(tmp_path), (0.5, 1.0), torch.float32)
    ids, mask = padded_batch("right")
    right = extract_hidden_states(model, ids, mask, [2, 4])
    torch.testing.assert_close(network(ids, mask), right, atol=1e-5, rtol=1e-5)


def test_holds_at_most_four_fifths_of_the_block_parameters_and_no_head(tmp_path):
    model = deep_llama()
    model.save_pretrained(tmp_path)
    network = load_feature_network(str(tmp_path), FRACTIONS, torch.bfloat16)
    whole = sum(part.numel() for part in model.model.layers.parameters())
    held = sum(part.numel() for part in network.backbone.layers.parameters())
    assert held <= 0.80 * whole
    assert held == whole * 9 // 12
    assert not any("lm_head" in name for name, _ in network.named_parameters())
    assert {part.dtype for part in network.parameters()} == {torch.bfloat16}
    assert not any(part.requires_grad for part in network.parameters())
    assert not network.train().training


def shard_by_block(folder) -> None:
    """Rewrites a single-file checkpoint as one shard per block and one for the rest."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: dict[str, dict] = {}
    for name, value in tensors.items():
        number = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{number}.safetensors", {})[name] = value
    for file, content in shards.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, content in shards.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded_checkpoint_needs_only_the_shards_of_its_blocks(tmp_path):
    model = deep_llama(4)
    model.save_pretrained(tmp_path)
    shard_by_block(tmp_path)
    (tmp_path / "model-3.safetensors").unlink()  # the block above the deepest tap
    network = load_feature_network(str(tmp_path), FRACTIONS, torch.float32)
    ids, mask = padded_batch("right")
    torch.testing.assert_close(network(ids, mask), extract_hidden_states(model, ids, mask, [1, 2, 3]))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors"):
        load_feature_network(str(tmp_path), FRACTIONS, torch.float32)


def test_reads_only_the_needed_tensors(tmp_path, monkeypatch):
    deep_llama(4).save_pretrained(tmp_path)
    read = []

    class Recorder:
        def __init__(self, *args, **kwargs):
            self.file = original(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    original = partial_checkpoint.safe_open
    monkeypatch.setattr(partial_checkpoint, "safe_open", Recorder)
    load_feature_network(str(tmp_path), (0.5,), torch.float32)
    assert {int(name.split(".")[2]) for name in read if ".layers." in name} == {0, 1}
    assert not any("lm_head" in name for name in read)


def test_missing_tensors_are_an_error(tmp_path):
    deep_llama(4).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        load_feature_network(str(tmp_path), FRACTIONS, torch.float32)


def test_checkpoint_without_safetensors(tmp_path):
    model = deep_llama(4)
    model.save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    network = load_feature_network(str(tmp_path), FRACTIONS, torch.float32)
    assert len(network.backbone.layers) == 3
    ids, mask = padded_batch("right")
    torch.testing.assert_close(network(ids, mask), extract_hidden_states(model, ids, mask, [1, 2, 3]))


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForMaskedLM])
def test_bidirectional_encoder_reads_rows_only(tmp_path, auto_class):
    model = build(auto_class, BERT)
    model.save_pretrained(tmp_path)
    network = load_feature_network(str(tmp_path), FRACTIONS, torch.float32)
    assert not network.is_causal
    ids, mask = padded_batch("right")
    right = extract_hidden_states(model, ids, mask, [1, 2, 3])
    torch.testing.assert_close(network(ids, mask, torch.zeros_like(ids)), right, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="bidirectional"):
        network(ids, mask.view(3, 1, 1, 9).bool())


def test_text_tower_of_a_multimodal_checkpoint(tmp_path):
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=MIXED_LAYERS, vision_config={**vision, "num_hidden_layers": 2})
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    network = load_feature_network(str(tmp_path), FRACTIONS, torch.float32)
    assert not any("vision" in name for name, _ in network.named_parameters())
    ids, mask = padded_batch("right")
    right = extract_hidden_states(model.model.language_model, ids, mask, [1, 2, 3])
    torch.testing.assert_close(network(ids, mask), right, atol=1e-5, rtol=1e-5)


def test_tree_mask(tmp_path):
    deep_llama(4).save_pretrained(tmp_path)
    network = load_feature_network(str(tmp_path), FRACTIONS, torch.float32)
    ids = torch.tensor([[3, 4, 5, 9, 10]])  # a reference of 3 tokens and two branches of one token
    allowed = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    allowed[4, 3] = False
    tree = network(ids, allowed.view(1, 1, 5, 5), torch.tensor([[0, 1, 2, 3, 3]]))
    alone = network(ids[:, [0, 1, 2, 4]], None)
    torch.testing.assert_close(tree[:, 4], alone[:, 3], atol=1e-5, rtol=1e-5)


def test_gguf_file(tmp_path):
    model = deep_llama(4)
    write_llama_gguf(model, tmp_path / "tiny.gguf")
    network = load_feature_network(str(tmp_path / "tiny.gguf"), FRACTIONS, torch.float32)
    assert len(network.backbone.layers) == 3
    ids, mask = padded_batch("right")
    right = extract_hidden_states(model, ids, mask, [1, 2, 3])
    torch.testing.assert_close(network(ids, mask), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fraction", "layers", "depth"),
    [(0.25, 30, 7), (0.5, 30, 15), (0.75, 30, 22), (0.0, 30, 1), (0.1, 4, 1), (1.0, 4, 4), (0.29, 100, 29)],
)
def test_layer_index(fraction, layers, depth):
    assert layer_index(fraction, layers) == depth


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"0\.\.1.*1\.5"):
        layer_index(1.5, 4)
    deep_llama(4).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="empty"):
        load_feature_network(str(tmp_path / "model"), (), torch.float32)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_feature_network(str(tmp_path / "nowhere"), FRACTIONS, torch.float32)
    T5Config(d_model=16, num_layers=2, d_ff=16, num_heads=2, vocab_size=32).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        load_feature_network(str(tmp_path / "t5"), FRACTIONS, torch.float32)
