"""Loads causal language models from a local folder, a hub name or a .gguf file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf_ebft.core.cpu_linear import use_onednn_linears

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def causal_lm_arguments(path: str) -> tuple[str, dict[str, Any]]:
    """Splits `path` into what `from_pretrained` takes: (folder or name, keyword arguments for a .gguf file).

    Raises FileNotFoundError when `path` looks like a local path that does not exist.
    """
    local = Path(path)
    if path.endswith(".gguf"):
        if not local.is_file():
            raise FileNotFoundError(f"model {path!r}: no such .gguf file")
        return str(local.parent), {"gguf_file": local.name}
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not local.expanduser().is_dir():
        raise FileNotFoundError(f"model {path!r}: no such folder")
    if local.is_dir() and not (local / "config.json").is_file():
        if (local / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"model {path!r}: the folder holds adapters, not a whole model; write one with "
                f"`openrlhf-ebft export {path} --merge --out DIR`"
            )
        raise FileNotFoundError(f"model {path!r}: the folder holds no config.json")
    return path, {}


def load_causal_lm(
    path: str, *, dtype: torch.dtype, attention: str = "sdpa", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Loads a causal language model in `dtype` on the CPU, key/value cache off.

    Args:
        path: local folder, hub name, or .gguf file.
        attention: transformers' attention implementation.
        trust_remote_code: run the repository's own Python code.
    """
    name, extra = causal_lm_arguments(path)
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code, **extra
    )
    model.config.use_cache = False
    use_onednn_linears(model)
    return model
