"""Tiny random models and tokenizers for tests: written to a folder as real ones are, built without a network."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
VOCAB = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_MERGES = (("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("t", "h"))


def _save_tokenizer(backend: Tokenizer, folder: Path, chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=512
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_tokenizer(folder: Path, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Saves a BPE tokenizer over lower-case text with at most 64 tokens; "hello" is one token, as is "he" or "llo".

    Anything outside its alphabet becomes <unk>. Ids of <pad>, <eos>, <unk>: 0, 1, 2.
    """
    pieces = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *" .,:;!?'\"()[]=+-*_\n"]
    pieces += [left + right for left, right in _MERGES]
    if len(pieces) > VOCAB:
        raise AssertionError(f"{len(pieces)} tokens do not fit a vocabulary of {VOCAB}")
    backend = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(_MERGES), unk_token="<unk>")
    )
    backend.decoder = decoders.Fuse()
    return _save_tokenizer(backend, Path(folder), chat_template)


def tiny_byte_tokenizer(folder: Path, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Saves a byte-level BPE tokenizer (3 special tokens, 256 bytes, a few merges): every text, byte by byte."""
    pieces = ["<pad>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [left + right for left, right in _MERGES]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _save_tokenizer(backend, Path(folder), chat_template)


def _save_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.save_pretrained(folder)
    return model.eval()


def tiny_llama(folder: Path, *, tied: bool = True, vocab: int = VOCAB, seed: int = 0) -> PreTrainedModel:
    """Saves and returns a random float32 Llama: 2 layers, hidden 64, 2 heads of 32, 1 key/value head.

    Weights are larger than usual (std 0.2), so that next-token distributions are far from flat.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return _save_model(LlamaForCausalLM(config), Path(folder))


def tiny_qwen2(folder: Path, *, tied: bool = False, vocab: int = VOCAB, seed: int = 0) -> PreTrainedModel:
    """Saves and returns a random float32 Qwen2 of the same size; its query, key and value layers have biases."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # biases start at zero, which would hide a lost bias
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return _save_model(model, Path(folder))


def tiny_gpt2(folder: Path, *, vocab: int = VOCAB, seed: int = 0) -> PreTrainedModel:
    """Saves and returns a random float32 GPT-2: 2 layers, hidden 64, 2 heads, learned positions, tied head."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=512,
        n_embd=64,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return _save_model(GPT2LMHeadModel(config), Path(folder))
