"""The newest complete model of a training run: its final model, or the weights inside its newest checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.load import load_config
from openrlhf_ebft.distributed.checkpoint_weights import ADAPTER_FOLDER
from openrlhf_ebft.distributed.weight_sync import ExpectedWeights, dtype_name
from openrlhf_ebft.models.lora import is_adapter_folder, load_merged

_MANIFEST = "manifest.json"
_STATES = "mp_rank_00_model_states.pt"  # DeepSpeed's name for the file with whole weights (ZeRO stages 0 to 2)
_WRAPPER = "model."  # the trainer's module holds the language model under this name
Say = Callable[[str], None]


@dataclass(frozen=True)
class RunModel:
    """Complete weights on disk.

    Attributes:
        weights: a folder with safetensors files or adapters, or one DeepSpeed file.
        version: names these weights; two different ones of a run never have the same.
        written: when they were complete, in nanoseconds since 1970.
    """

    weights: Path
    version: str
    written: int


def base_model(run: Path) -> str:
    """The model folder or hub name that gives architecture and tokenizer.

    Raises:
        UserError: no run directory.
    """
    if (run / "model" / "config.json").is_file():
        return str(run / "model")
    if not (run / "config.yaml").is_file():
        raise UserError(f"follow.run = {run}: no run directory (it has no config.yaml)")
    return load_config(run / "config.yaml").model.path


def require_followable(run: Path) -> None:
    """Raise UserError for a run that can never be followed: no run directory, or one without any whole weights."""
    base_model(run)
    if _final(run) is not None:
        return
    config = load_config(run / "config.yaml")
    if config.deepspeed.zero_stage == 3 and not config.lora.is_on:
        raise UserError(
            f"follow.run = {run}: its deepspeed.zero_stage = 3 splits the weights in its checkpoints, and it has no "
            "final model yet: train with stage 0 to 2 or with lora.rank above 0, or serve an export "
            "(openrlhf-ebft export) by model.path"
        )


def complete_models(run: Path, say: Say) -> list[RunModel]:
    """All complete weights of a run, newest first. What is passed over is said."""
    final = _final(run)
    found = [*([final] if final is not None else []), *_checkpoints(run, say)]
    return sorted(found, key=lambda model: -model.written)


def read_weights(model: RunModel, expected: ExpectedWeights) -> dict[str, Tensor]:
    """All tensors on the CPU under Hugging Face names, tied ones under each of their names.

    Args:
        model: which weights.
        expected: names, shapes and dtypes that the engine's model has; floating tensors are cast to its dtype.

    Raises:
        ValueError: tensors are missing, unknown or of another shape; names them.
        OSError: the files have gone.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in _named_tensors(model.weights, _floating_dtype(expected)):
        spec = expected.specs.get(name)
        if spec is None:
            raise ValueError(f"{model.weights} holds {name}, which the served model does not have")
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{model.weights}: {name} has shape {tuple(tensor.shape)}, served is {spec.shape}")
        tensors[name] = tensor if dtype_name(tensor.dtype) == spec.dtype else tensor.to(getattr(torch, spec.dtype))
    for names in expected.tied:
        known = next((name for name in names if name in tensors), None)
        tensors |= {name: tensors[known] for name in names if known is not None and name not in tensors}
    missing = sorted(set(expected.specs) - set(tensors))
    if missing:
        raise ValueError(f"{model.weights} lacks {len(missing)} tensors of the served model, such as {missing[0]}")
    return tensors


def _floating_dtype(expected: ExpectedWeights) -> torch.dtype:
    dtypes = [getattr(torch, spec.dtype) for spec in expected.specs.values()]
    return next(dtype for dtype in dtypes if dtype.is_floating_point)


def _named_tensors(weights: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What the files hold; adapters are merged into their base model's weights as `dtype` has them."""
    if weights.is_file():
        states = torch.load(weights, map_location="cpu", weights_only=True)
        for name, tensor in states["module"].items():
            yield name.removeprefix(_WRAPPER), tensor
        return
    if is_adapter_folder(weights):
        yield from load_merged(weights, dtype=dtype).state_dict().items()
        return
    for path in sorted(weights.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def _final(run: Path) -> RunModel | None:
    """The trainer moves its final model into place in one piece, so what is there is complete."""
    folder = run / "model"
    settings = folder / ("adapter_config.json" if is_adapter_folder(folder) else "config.json")
    files = [*folder.glob("*.safetensors"), settings]
    if len(files) == 1 or not settings.is_file():
        return None
    written = max(path.stat().st_mtime_ns for path in files)
    return RunModel(folder, f"model@{written}", written)


def _checkpoints(run: Path, say: Say) -> Iterator[RunModel]:
    """The checkpoints whose files are as their manifests say."""
    for path in sorted((run / "checkpoints").glob("step-*")):
        if not _is_checkpoint_name(path.name):
            continue  # being written, or set aside
        try:
            yield _complete(path)
        except (OSError, ValueError, KeyError) as error:
            say(f"passing over {path}: {error}")


def _is_checkpoint_name(name: str) -> bool:
    return name.startswith("step-") and name.removeprefix("step-").isdigit()


def _complete(path: Path) -> RunModel:
    files = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["files"]
    for name, record in files.items():
        size = (path / name).stat().st_size
        if size != record["bytes"]:
            raise ValueError(f"{name} has {size} bytes, written were {record['bytes']}")
    written = (path / _MANIFEST).stat().st_mtime_ns
    version = f"{path.name}@{written}"
    adapters = [path / name for name in files if Path(name).parent.name == ADAPTER_FOLDER]
    if adapters:
        return RunModel(adapters[0].parent, version, written)
    states = [name for name in files if Path(name).name == _STATES]
    if not states:
        raise ValueError(f"it has no {_STATES}: checkpoints of ZeRO stage 3 hold no whole weights")
    return RunModel(path / states[0], version, written)


def require_unchanged(model: RunModel) -> None:
    """Compares a checkpoint's weights with the sums in its manifest.

    Raises:
        ValueError: a file holds other content than was written.
    """
    folder = next((parent for parent in model.weights.parents if _is_checkpoint_name(parent.name)), None)
    if folder is None:  # a final model
        return
    files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
    for path in [model.weights] if model.weights.is_file() else sorted(model.weights.iterdir()):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != files[str(path.relative_to(folder))]["sha256"]:
                raise ValueError(f"{path} holds other content than was written")
