"""Tiny random transformers models of many families, without files."""

import torch
from transformers import (
    BertConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
)

VOCAB, HIDDEN, LAYERS = 48, 32, 4
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "qwen3": Qwen3Config(**_GROUPED, head_dim=8),
    "mistral": MistralConfig(**_GROUPED, sliding_window=None),
    "gemma": GemmaConfig(**_GROUPED, head_dim=8),
    "gpt2": GPT2Config(
        **{key: _COMMON[key] for key in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")},
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        n_positions=64,
    ),
    "gpt_neox": GPTNeoXConfig(**_COMMON, intermediate_size=48),
    "opt": OPTConfig(**{k: v for k, v in _COMMON.items() if k != "initializer_range"}, ffn_dim=48, init_std=0.2),
    "opt_projected": OPTConfig(
        **{k: v for k, v in _COMMON.items() if k != "initializer_range"},
        ffn_dim=48,
        word_embed_proj_dim=16,
        do_layer_norm_before=False,
    ),
    "mixtral": MixtralConfig(**_GROUPED, num_local_experts=LAYERS, num_experts_per_tok=2),
}
CONFIGS["opt_projected"].init_std = 0.2
BERT = BertConfig(**_COMMON, intermediate_size=48)


def build(auto_class, config: PreTrainedConfig, seed: int = 0):
    torch.manual_seed(seed)
    return auto_class.from_config(config).eval()


def padded_batch(side: str, rows: int = 3, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask (rows, length); row i has length - 2*i valid tokens."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        padding = slice(0, 2 * row) if side == "left" else slice(length - 2 * row, length)
        mask[row, padding] = 0
    return ids * mask, mask
