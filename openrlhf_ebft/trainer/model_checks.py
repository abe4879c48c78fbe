"""What can be known of the models before any of them is loaded: they exist, are whole, and fit data and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from openrlhf_ebft.config.errors import UserError, one_line
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.core.positions import position_limit
from openrlhf_ebft.core.turns import longest_own_history
from openrlhf_ebft.models.loading import causal_lm_arguments
from openrlhf_ebft.models.lora import check_targets

_INDEX = "model.safetensors.index.json"


def read_models(config: EBFTConfig) -> dict[str, Any]:
    """The language-model configurations of policy and feature network, by the key that names the model.

    Raises UserError when one is missing or damaged; weights of a local folder are looked at, too, but not read.
    """
    paths = {"model.path": config.model.path}
    if config.features.path is not None:
        paths["features.path"] = config.features.path
    models = {key: _read_config(key, path, config.model.trust_remote_code) for key, path in paths.items()}
    for key, path in paths.items():
        _check_weights(key, Path(path))
    if config.lora.is_on:
        _check_adapters(config)
    return models


def check_sizes(config: EBFTConfig, models: dict[str, Any], references: Sequence[Reference]) -> int:
    """Checks that `models` can hold the data; returns the engines' limit of prompt + completion, in tokens.

    Raises UserError when a model has fewer positions or token ids than the data needs.
    """
    longest = max(max(int((ref.anchors + ref.max_new_tokens).max()), ref.token_ids.numel()) for ref in references)
    if config.data.history == "own":
        longest = max(longest, *(longest_own_history(ref) for ref in references))
    largest_id = max(int(ref.token_ids.max()) for ref in references)
    needed = longest + 1  # vllm scores a sequence only with room for one more token
    for key, model in models.items():
        _check_size(config, key, model, needed if key == "model.path" else longest, largest_id)
    limit = config.rollout.max_model_len
    if limit is not None and limit < needed:
        raise UserError(
            f"rollout.max_model_len = {limit}, but the data needs {needed}: set it to {needed} or more, or leave it out"
        )
    positions = position_limit(models["model.path"])
    if limit is not None and positions is not None and limit > positions:
        raise UserError(
            f"rollout.max_model_len = {limit}, but model.path = {config.model.path} has {positions} positions: set it "
            f"to {positions} or less, or leave it out"
        )
    return limit or needed


def _read_config(key: str, path: str, trust_remote_code: bool) -> Any:
    """The language model's part of the model's configuration."""
    try:
        name, extra = causal_lm_arguments(path)
        model = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    except FileNotFoundError as error:
        raise UserError(f"{key}: {error}") from None
    except (OSError, ValueError, KeyError) as error:
        # A job's relative paths lie in Ray's copy of the working directory: say where was looked.
        where = "" if Path(path).exists() else f"no such folder in {Path.cwd()}, and as a name of the hub "
        raise UserError(f"{key} = {path}: {where}its configuration cannot be read: {one_line(error)}") from None
    return model.get_text_config()


def _check_adapters(config: EBFTConfig) -> None:
    """Raises UserError when the model has no linear modules of the names in lora.targets."""
    try:
        check_targets(config.model.path, config.lora, trust_remote_code=config.model.trust_remote_code)
    except ValueError as error:
        targets = list(config.lora.targets)
        raise UserError(f"lora.targets = {targets} with model.path = {config.model.path}: {error}") from None


def _check_weights(key: str, folder: Path) -> None:
    """Looks at a local folder's weight files without reading the weights; hub names are looked at when they load."""
    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        raise UserError(f"{key} = {folder}: the folder holds no weights (*.safetensors or *.bin)")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                continue
        except (SafetensorError, OSError) as error:
            raise UserError(f"{key}: {file} is damaged: {error}") from None
    if (folder / _INDEX).is_file():
        named = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise UserError(f"{key} = {folder}: {_INDEX} names {len(missing)} missing files, first {missing[0]}")


def _check_size(config: EBFTConfig, key: str, model: Any, needed: int, largest_id: int) -> None:
    what = f"{key} = {config.model.path if key == 'model.path' else config.features.path}"
    positions = position_limit(model)  # models without positions have no such limit
    data = config.data
    if positions is not None and needed > positions:
        keys = f"data.sequence_length = {data.sequence_length}"
        if data.mode == "structured":
            keys = (
                f"data.max_prompt_tokens = {data.max_prompt_tokens}, data.max_ground_truth_tokens = "
                f"{data.max_ground_truth_tokens} or rollout.max_new_tokens = {config.rollout.max_new_tokens}"
            )
        table = getattr(model, "max_position_embeddings", None)
        kept = "" if positions == table else f" up to which its longrope turns all tokens alike (of {table})"
        raise UserError(
            f"the data needs sequences of {needed} tokens, but {what} has {positions} positions{kept}: lower {keys}"
        )
    if largest_id >= model.vocab_size:
        tokenizer = config.model.tokenizer or config.model.path
        raise UserError(
            f"tokenizer {tokenizer} gives token ids up to {largest_id}, but {what} has a vocabulary of "
            f"{model.vocab_size} tokens: name the tokenizer that belongs to it (model.tokenizer)"
        )
