"""A toy for whole runs: documents of a Markov chain over letters, and features that are one-hot in the token.

With windows of one token and one-hot features the expected feature-matching loss of a context is
||p - q||^2 + 1 - ||q||^2, p the policy's and q the chain's next-token distribution: its floor is reached at p = q.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<unk>"]
LETTERS = "abcde"
VOCAB = len(SPECIAL) + len(LETTERS)
LENGTH = 34
CHAIN = torch.softmax(
    1.2 * torch.randn(len(LETTERS), len(LETTERS), generator=torch.Generator().manual_seed(5), dtype=torch.float64), -1
)


def next_token(tokens: torch.Tensor) -> torch.Tensor:
    """(..., VOCAB) float64: the chain's distribution behind each token id."""
    table = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    table[len(SPECIAL) :, len(SPECIAL) :] = CHAIN
    return table[tokens]


def draw_document(generator: torch.Generator) -> torch.Tensor:
    """(LENGTH,) token ids of a walk along the chain."""
    states = [0]
    while len(states) < LENGTH:
        states.append(int(torch.multinomial(CHAIN[states[-1]], 1, generator=generator)))
    return torch.tensor(states) + len(SPECIAL)


def write_inputs(folder: Path, documents: int) -> None:
    """`policy` (random, with the tokenizer), `features` (one-hot) and `documents.jsonl`."""
    torch.manual_seed(0)
    _llama(LlamaForCausalLM, 16).save_pretrained(folder / "policy")
    _one_hot().save_pretrained(folder / "features")
    for name in ("policy", "features"):
        _tokenizer().save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(1)
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(documents):
            letters = (draw_document(generator) - len(SPECIAL)).tolist()
            file.write(json.dumps({"text": "".join(LETTERS[letter] for letter in letters)}) + "\n")


def sections(folder: Path) -> dict[str, Any]:
    """The configuration's sections that make the toy."""
    return {
        "model": {"path": str(folder / "policy"), "attention": "split"},
        "data": {
            "mode": "strided",
            "path": str(folder / "documents.jsonl"),
            "text_column": "text",
            "append_eos": False,
            "stride": 1,
            "context_length": 2,
            "generate_max_len": 1,
            "sequence_length": LENGTH,
        },
        "features": {"path": str(folder / "features"), "layer_fractions": [1.0], "whitening": "none"},
        "rollout": {"engine": "transformers", "temperature": 1.0, "samples_per_prompt": 8},
        "optimizer": {"schedule": "linear", "min_lr_ratio": 0.02, "betas": [0.9, 0.999], "max_grad_norm": 0},
    }


def _llama(kind: type, hidden: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return kind(config).eval()


def _one_hot() -> LlamaModel:
    """A network whose block adds nothing to its embedding, which is the identity."""
    backbone = _llama(LlamaModel, VOCAB)
    with torch.no_grad():
        backbone.embed_tokens.weight.copy_(torch.eye(VOCAB))
        backbone.layers[0].self_attn.o_proj.weight.zero_()
        backbone.layers[0].mlp.down_proj.weight.zero_()
    return backbone


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )
