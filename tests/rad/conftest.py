"""Tiny random models and a word-level tokenizer for the RAD tests (float32, CPU, two layers)."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)

VOCAB = 48
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
# Spread wide enough that rewards differ between candidates, and no wider: at 0.4 a full float32 forward is itself 1e-5
# away from float64.
SPREAD = {"initializer_range": 0.2}


def configs() -> dict[str, object]:
    """One configuration per architecture, all without sliding windows."""
    return {
        "llama": LlamaConfig(**GATED, **SPREAD),
        "qwen2": Qwen2Config(**GATED, **SPREAD),
        "qwen3": Qwen3Config(**GATED, **SPREAD, head_dim=8),
        "mistral": MistralConfig(**GATED, **SPREAD, sliding_window=None),
        "gemma2": Gemma2Config(**GATED, **SPREAD, head_dim=8),
        "granite": GraniteConfig(**GATED, **SPREAD),
        "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, **SPREAD),
        "gpt_neox": GPTNeoXConfig(**SMALL, **SPREAD, intermediate_size=64, max_position_embeddings=64),
        "opt": OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, init_std=0.2),
    }


def windowed_configs() -> dict[str, object]:
    """Architectures with a sliding window of 4 tokens."""
    return {
        "mistral": MistralConfig(**GATED, **SPREAD, sliding_window=4),
        "gemma2": Gemma2Config(**GATED, **SPREAD, head_dim=8, sliding_window=4),
        "gemma3": Gemma3TextConfig(
            **GATED, **SPREAD, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
        ),
        "qwen2": Qwen2Config(**GATED, **SPREAD, sliding_window=4, use_sliding_window=True, max_window_layers=1),
    }


def encoder_configs() -> dict[str, object]:
    """Encoder-only architectures."""
    shape = {**SMALL, **SPREAD, "intermediate_size": 48, "max_position_embeddings": 66}
    return {"bert": BertConfig(**shape), "roberta": RobertaConfig(**shape, pad_token_id=1)}


def make_tokenizer(words: int = VOCAB, prefix: str = "w") -> PreTrainedTokenizerFast:
    """A word-level tokenizer: <unk> 0, <pad> 1, <eos> 2, then `w3`, `w4`, ..."""
    names = ["<unk>", "<pad>", "<eos>"] + [f"{prefix}{index}" for index in range(3, words)]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", model_max_length=10**30
    )


def make_classifier(config, labels: int = 1, seed: int = 0):
    """A random classifier of `config`'s architecture in eval mode."""
    torch.manual_seed(seed)
    config.num_labels = labels
    return AutoModelForSequenceClassification.from_config(config).eval()


def make_lm(config, seed: int = 1):
    """A random causal language model in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def save_classifier(folder, config, labels: int = 1, tokenizer=None) -> str:
    """A classifier and its tokenizer in a folder."""
    make_classifier(config, labels).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def llama_reward(tmp_path):
    return save_classifier(tmp_path / "reward", configs()["llama"])
