"""Writes a tiny Llama, with its tokenizer where a test needs one, as a .gguf file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_NORMAL, _CONTROL = 1, 3  # token types of the format


def write_llama_gguf(model: PreTrainedModel, path: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """The GGUF layout of a Llama: its own names, rotary halves interleaved in query and key; weights as they are."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:
                value = value.view(heads, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    """A byte-level BPE, which the format calls gpt2."""
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in tokenizer.all_special_tokens else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
