"""Copies a model of the hub into a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from openrlhf_ebft.config.errors import UserError

# Weights in safetensors, tokenizers, configurations; no pickled weights, no code.
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja"]


def fetch_hub_model(name: str, out: Path) -> None:
    """Downloads the safetensors, tokenizer and configuration files of hub model `name` to the folder `out`.

    Raises:
        UserError: the hub has no such model, cannot be reached, or the model has no safetensors weights.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        try:
            snapshot_download(name, local_dir=partial, allow_patterns=_FILES)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(f"{name}: no such file, and not found as a hub model: {error}") from error
        if not any(partial.glob("*.safetensors")):
            raise UserError(f"{name}: the hub model has no safetensors weights")
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
