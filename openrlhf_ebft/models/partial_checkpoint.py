"""Reads from a checkpoint only the tensors that the first blocks of a backbone need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def _find(path: str, name: str) -> str | None:
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False)


def tensor_files(path: str) -> dict[str, str] | None:
    """Maps every tensor name of a safetensors checkpoint to the file (name) that holds it.

    Args:
        path: local folder or hub name.
    Returns:
        None if the checkpoint holds no safetensors.
    """
    index = _find(path, INDEX_FILE)
    if index is not None:
        return dict(json.loads(Path(index).read_text())["weight_map"])
    single = _find(path, SINGLE_FILE)
    if single is None:
        return None
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def needed_tensors(names: Iterable[str], backbone: nn.Module, blocks_path: str, num_blocks: int) -> dict[str, str]:
    """Chooses the tensors of a backbone's first blocks: checkpoint name -> name inside the backbone.

    A checkpoint may hold the backbone bare or below a prefix ("model.", "bert.", "model.language_model."), beside
    heads and other towers. The prefix is the one under which most of the backbone's own names are found.

    Args:
        names: tensor names of the checkpoint.
        backbone: the shortened model (its weights may be on the meta device).
        blocks_path: path of the list of blocks inside the backbone, such as "layers" or "encoder.layer".
        num_blocks: number of blocks to keep.
    """
    names = list(names)
    block = re.compile(rf"^(?P<prefix>|.*\.){re.escape(blocks_path)}\.(?P<number>\d+)\.")
    prefixes = {match["prefix"] for name in names if (match := block.match(name))} or {""}
    expected = set(backbone.state_dict())

    def found(prefix: str) -> int:
        return sum(name.startswith(prefix) and name[len(prefix) :] in expected for name in names)

    prefix = max(sorted(prefixes), key=found)
    parts = {name.split(".")[0] for name in expected}
    chosen = {}
    for name in names:
        inner = name[len(prefix) :] if name.startswith(prefix) else ""
        match = block.match(inner)
        too_deep = match is not None and not match["prefix"] and int(match["number"]) >= num_blocks
        if inner.split(".")[0] in parts and not too_deep:
            chosen[name] = inner
    return chosen


def read_tensors(path: str, files: dict[str, str], chosen: dict[str, str]) -> dict[str, Tensor]:
    """Reads the chosen tensors to the CPU, opening (and, from a hub, fetching) only the files that hold them.

    Args:
        path: local folder or hub name.
        files: tensor name -> file name (`tensor_files`).
        chosen: checkpoint name -> name in the result (`needed_tensors`).
    Raises:
        FileNotFoundError: a file that the index names is missing.
    """
    tensors = {}
    for file_name in sorted({files[name] for name in chosen}):
        local = _find(path, file_name)
        if local is None:
            raise FileNotFoundError(f"checkpoint {path!r}: {INDEX_FILE} names {file_name}, which is not there")
        with safe_open(local, framework="pt") as file:
            for name, inner in chosen.items():
                if files[name] == file_name:
                    tensors[inner] = file.get_tensor(name)
    return tensors
