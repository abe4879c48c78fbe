"""Reward models saved by the authors' trainer (github.com/r-three/RAD) as ordinary sequence classifiers.

There, a GPT-2's LM head is replaced by a linear layer with one or several outputs and a bias. transformers' GPT-2
classifier has no bias, so the bias b is moved into the last layer norm's bias: with the head's weight W, adding
pinv(W) b to it adds W pinv(W) b = b to the outputs, exactly when the rows of W are linearly independent.
"""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2ForSequenceClassification

from openrlhf_ebft.rad.loading import has_tokenizer, load_tokenizer

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# GPT-2 of every published size has heads of 64 values; the state dict alone does not tell.
HEAD_WIDTH = 64
# The weights that every GPT-2 has and that tell its shapes.
_SHAPE_GIVERS = ("wte.weight", "wpe.weight", "ln_f.bias", "h.0.mlp.c_fc.weight")
# What config.json states and the weights do not tell.
_STATED = (
    "activation_function",
    "layer_norm_epsilon",
    "reorder_and_upcast_attn",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
)
# Largest difference, relative to the bias, that the moved bias may show before the head counts as dependent.
_BIAS_TOLERANCE = 1e-4


def convert_reward_model(
    source: str | Path,
    output_dir: str | Path,
    *,
    tokenizer: str | Path | None = None,
    num_heads: int | None = None,
) -> Path:
    """Write a folder that `load_sequence_classifier` reads and that gives the same scores (1e-5 in float32).

    Args:
        source: folder with model.safetensors or pytorch_model.bin (read with weights_only), or that file itself; a
            config.json beside it is used where its shapes fit.
        output_dir: folder to write; the score is read with `score_transform="none"`, as the authors do.
        tokenizer: folder or hub id of the GPT-2 tokenizer; default: the one in `source`.
        num_heads: attention heads; default: config.json's, else hidden size / 64.

    Returns:
        `output_dir`.

    Raises:
        FileNotFoundError: no weights or no tokenizer.
        ValueError: weights that are not a GPT-2 with a linear head, or shapes that do not fit; the message names them.
    """
    weights_path = _find_weights(Path(source))
    trunk, head, bias = split_weights(_read_weights(weights_path), weights_path)
    config = _config_of(trunk, head, weights_path.parent / "config.json", num_heads)
    model = GPT2ForSequenceClassification(config).eval()
    state = {f"transformer.{name}": tensor.float() for name, tensor in trunk.items()} | {"score.weight": head.float()}
    _load(model, state, weights_path)
    if bias is not None:
        with torch.no_grad():
            model.transformer.ln_f.bias += bias_shift(head, bias)
    vocabulary = load_tokenizer(tokenizer or _tokenizer_folder(weights_path.parent))
    model.config.pad_token_id = vocabulary.pad_token_id
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    vocabulary.save_pretrained(folder)
    return folder


def split_weights(
    weights: dict[str, torch.Tensor], origin: Path
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """The GPT-2's own weights (names as in GPT2Model), the head [outputs, hidden], its bias [outputs] or None.

    Raises:
        ValueError: no head, or no GPT-2 weights (the message lists the names found), or a head of other shapes.
    """
    trunk: dict[str, torch.Tensor] = {}
    head: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        short = name.removeprefix("module.").removeprefix("model.")
        owner, _, rest = short.partition(".")
        if owner in ("lm_head", "score"):
            head[rest] = tensor
        elif not rest.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks of older library versions
            trunk[short.removeprefix("transformer.")] = tensor
    missing = [f"transformer.{name}" for name in _SHAPE_GIVERS if name not in trunk]
    missing += [] if "weight" in head else ["lm_head.weight"]
    if missing:
        found = ", ".join(sorted(weights)[:6])
        raise ValueError(
            f"{origin} is not a GPT-2 with a linear head: {', '.join(missing)} missing; it holds {found}, ..."
        )
    if head["weight"].dim() == 2 and head["weight"].size(0) == trunk["wte.weight"].size(0):
        raise ValueError(
            f"{origin}: its head has as many outputs as the vocabulary has tokens ({head['weight'].size(0)}); "
            "it is a language model, not a reward model"
        )
    _check_head(head["weight"], head.get("bias"), origin)
    return trunk, head["weight"], head.get("bias")


def _check_head(weight: torch.Tensor, bias: torch.Tensor | None, origin: Path) -> None:
    shapes = f"weight {tuple(weight.shape)}" + ("" if bias is None else f" and bias {tuple(bias.shape)}")
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"{origin}: its head must be [outputs, hidden] with a bias [outputs] or none, but has {shapes}"
        )
    if not all(bool(part.isfinite().all()) for part in (weight, bias) if part is not None):
        raise ValueError(f"{origin}: its head holds values that are not finite")


def bias_shift(head: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What to add to the hidden states [hidden] so that `head` [outputs, hidden] adds `bias` [outputs].

    Raises:
        ValueError: the head's rows are linearly dependent and cannot produce the bias.
    """
    weight, wanted = head.double(), bias.double()
    shift = torch.linalg.pinv(weight) @ wanted
    error = float((weight @ shift - wanted).abs().max())
    if error > _BIAS_TOLERANCE * max(float(wanted.abs().max()), 1e-12):
        raise ValueError(
            f"the head's bias cannot be moved into the last layer norm (error {error:.2g}): dependent rows"
        )
    return shift.float()


def _find_weights(source: Path) -> Path:
    if source.is_file():
        return source
    for name in WEIGHT_FILES:
        if (source / name).is_file():
            return source / name
    raise FileNotFoundError(f"{source} holds neither {' nor '.join(WEIGHT_FILES)}")


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as fault:
            raise ValueError(f"{path} is no safetensors file, or damaged: {fault}") from fault
    weights = _unpickled(path)
    named = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not named or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"{path} must hold a state dict of tensors, but holds a {type(weights).__name__}")
    return weights


def _unpickled(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the format of files that are then refused
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as fault:
            # torch's own message tells how to run what the file holds.
            raise ValueError(
                f"{path} is damaged or holds more than tensors; it is read with weights_only, so nothing in it was run"
            ) from fault


def _config_of(
    trunk: dict[str, torch.Tensor], head: torch.Tensor, config_file: Path, num_heads: int | None
) -> GPT2Config:
    """GPT-2's shapes from the weights; the rest from config.json if there is one."""
    stated = _read_config(config_file) if config_file.is_file() else {}
    hidden = trunk["wte.weight"].size(1)
    heads = stated.get("n_head", hidden // HEAD_WIDTH) if num_heads is None else num_heads
    if not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ValueError(f"{heads!r} attention heads do not divide the hidden size {hidden}; give num_heads")
    kept = {name: stated[name] for name in _STATED if name in stated}
    blocks = {int(name.split(".")[1]) for name in trunk if name.startswith("h.")}
    return GPT2Config(
        vocab_size=trunk["wte.weight"].size(0),
        n_positions=trunk["wpe.weight"].size(0),
        n_embd=hidden,
        n_layer=len(blocks),
        n_head=heads,
        n_inner=trunk["h.0.mlp.c_fc.weight"].size(1),
        num_labels=head.size(0),
        **kept,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise ValueError(f"{path} is not JSON: {fault}") from None
    if not isinstance(stated, dict):
        raise ValueError(f"{path} must hold an object, but holds a {type(stated).__name__}")
    return stated


def _load(model: GPT2ForSequenceClassification, state: dict[str, torch.Tensor], origin: Path) -> None:
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as fault:  # names the weights whose shapes differ
        raise ValueError(f"{origin} does not fit a GPT-2 classifier: {fault}") from fault
    if missing or unexpected:
        raise ValueError(
            f"{origin} does not fit a GPT-2 classifier: missing {', '.join(missing[:5]) or 'none'}; "
            f"unexpected {', '.join(unexpected[:5]) or 'none'}"
        )


def _tokenizer_folder(folder: Path) -> Path:
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"{folder} holds no tokenizer: name one (a GPT-2 tokenizer's folder or hub id)")
    return folder
