"""Converts a .gguf file to a Hugging Face folder that every part of the stack loads."""

from __future__ import annotations

import copy
import os
import shutil
import struct
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def convert_gguf(source: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Dequantises `source` in float32 and saves model, tokenizer and generation config to the folder `out` in `dtype`.

    The folder is written aside and renamed, so it is complete or absent. Returns the model as it was saved.

    Raises:
        FileNotFoundError: no such file.
        FileExistsError: `out` exists and is not empty.
        ValueError: the file is no GGUF, or of an architecture or tokenizer that transformers cannot convert.
    """
    if not source.is_file():
        raise FileNotFoundError(2, "No such file", str(source))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(17, "exists and is not empty: remove it or choose another folder", str(out))
    model, tokenizer = _read_gguf(source)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return model


def _read_gguf(source: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns (float32 model, tokenizer); the model is a plain one, without a trace of its quantisation."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        quantised = AutoModelForCausalLM.from_pretrained(dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, KeyError, IndexError, NotImplementedError, OSError, struct.error) as error:
        raise ValueError(f"{source}: cannot be converted: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{source}: its tokenizer has no EOS token")
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):  # save_pretrained refuses a model that says it is quantised
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    return model, tokenizer
