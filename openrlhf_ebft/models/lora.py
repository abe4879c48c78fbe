"""Low-rank adapters inside a causal language model, by peft: added, switched off, merged aside, named for files.

An adapted linear layer computes W x + s B A x; W stays frozen. Merged weights are always computed beside the model,
in float32, so W never takes part in rounding and stays the same bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from openrlhf_ebft.config.lora import ALL_LINEAR, LoRAConfig
from openrlhf_ebft.models.loading import causal_lm_arguments, load_causal_lm

_NAME = "default"  # peft's name for the only adapter
_FILE_PREFIX = "base_model.model."  # before every tensor's name in an adapter file
_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BASE = ".base_layer."  # in the name of a parameter that an adapted layer wraps


class LoRAAdapters:
    """The adapters of one model, which stays the model that it was: same class, attributes and config."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        """`model` has its adapters already: see `add_adapters`."""
        self.model = model
        self.config = config
        self._layers = {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside the `with` block the model computes what it would without adapters."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Adapter parameters under their names in peft's adapter files."""
        for name, parameter in self.model.named_parameters():
            if _is_adapter(name):
                yield _FILE_PREFIX + name.replace(f".{_NAME}.", "."), parameter

    def base_parameters(self) -> Iterator[tuple[str, nn.Parameter, list[nn.Parameter]]]:
        """Every other parameter under its name without adapters, and the factors [A, B] that belong to it, if any.

        Tied parameters come under each of their names.
        """
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if _is_adapter(name):
                continue
            factors: list[nn.Parameter] = []
            if name.endswith(f"{_BASE}weight"):
                layer = self._layers[name.removesuffix(f"{_BASE}weight")]
                factors = [layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight]
            yield name.replace(_BASE, "."), parameter, factors

    def merge(self, name: str, weight: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """W + s B A in float32, then in the dtype of W; a new tensor.

        Args:
            name: name of the weight, as `base_parameters` gives it.
            weight: full W.
            factors: full A (rank, in) and B (out, rank).
        """
        layer = self._layers[name.removesuffix(".weight")]
        down, up = (factor.detach().float() for factor in factors)
        change = (up @ down) * layer.scaling[_NAME]
        if layer.fan_in_fan_out:  # GPT-2 keeps its weights as (in, out)
            change = change.T
        return (weight.detach().float() + change).to(weight.dtype)


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def keep_adapters(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """State-dict hook of a module with adapters: its state is the adapters alone, without weights that never change.

    DeepSpeed's own switch for frozen weights keeps those that are tied to another one.
    """
    for name in [name for name in state if name.startswith(prefix) and not _is_adapter(name)]:
        del state[name]


def add_adapters(model: PreTrainedModel, config: LoRAConfig, *, seed: int) -> LoRAAdapters:
    """Freezes `model` and puts adapters into it; B starts at zero, so its outputs stay the same.

    Args:
        model: a causal language model; changed in place.
        config: rank above 0.
        seed: of A's initial values, which must be equal on all ranks.
    Raises:
        ValueError: see `find_targets`.
    """
    targets = find_targets(model, config.targets)
    linear = linear_modules(model)
    transposed = [isinstance(part, Conv1D) for name, part in linear.items() if _matches(name, targets)]
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        use_rslora=config.rslora,
        task_type="CAUSAL_LM",
        fan_in_fan_out=all(transposed),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        get_peft_model(model, settings, autocast_adapter_dtype=False)
    return LoRAAdapters(model, settings)


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The model's linear modules by name, GPT-2's transposed ones included."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}


def find_targets(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Names for peft: the last parts of module names, or whole names where a last part would match too much.

    Args:
        model: any causal language model without adapters; may be on the meta device.
        targets: endings of module names, such as `q_proj` or `layers.0.mlp.up_proj`; `all-linear` among them stands for
            all linear modules but the output head.
    Raises:
        ValueError: a name that no linear module has, with the names that there are; or a head tied to the embedding.
    """
    linear = linear_modules(model)
    head = model.get_output_embeddings()
    named = [target for target in targets if target != ALL_LINEAR]
    for target in named:
        _check_target(target, model, linear, head)
    if ALL_LINEAR not in targets:
        return named
    wanted = {name for name, part in linear.items() if part is not head or _matches(name, named)}
    endings = sorted({name.rsplit(".", 1)[-1] for name in wanted})
    matched = {name for name, _ in model.named_modules() if _matches(name, endings)}
    return endings if matched == wanted else sorted(wanted)


def _check_target(target: str, model: PreTrainedModel, linear: dict[str, nn.Module], head: nn.Module | None) -> None:
    matched = {name: part for name, part in model.named_modules() if _matches(name, [target])}
    kind = type(model).__name__
    others = [f"{name} ({type(part).__name__})" for name, part in matched.items() if name not in linear]
    if not matched or others:
        problem = f"is no linear module: {others[0]}" if others else "is the name of no module"
        endings = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ValueError(f"target {target!r} {problem} of {kind}; its linear modules: {', '.join(endings)}")
    if head in matched.values() and head.weight is model.get_input_embeddings().weight:
        raise ValueError(
            f"target {target!r} is the output head of {kind}, whose weight is that of the input embedding (tied): an "
            "adapter would change one and not the other; leave it out"
        )


def _matches(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def check_targets(path: str, config: LoRAConfig, *, trust_remote_code: bool = False) -> None:
    """Raises ValueError, as `find_targets`, for targets that the model at `path` lacks; loads no weights."""
    find_targets(empty_model(path, trust_remote_code=trust_remote_code), config.targets)


def empty_model(path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The architecture of the model at `path`, on the meta device."""
    name, extra = causal_lm_arguments(path)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def save_adapters(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor], base: str) -> None:
    """Writes an adapter folder as peft does.

    Args:
        folder: existing folder.
        config: as `LoRAAdapters.config`.
        tensors: the adapters in full, under peft's names.
        base: folder or hub name of the base model; a local folder is written as an absolute path.
    """
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _TENSORS, {"format": "pt"})
    record = copy.copy(config)
    record.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    record.target_modules = sorted(config.target_modules)
    record.inference_mode = True
    record.save_pretrained(str(folder))


def is_adapter_folder(path: str | Path) -> bool:
    """Whether `path` holds adapters instead of a whole model."""
    folder = Path(path)
    return (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_base(folder: str | Path) -> str:
    """Folder or hub name of the base model of adapters, as they name it."""
    return PeftConfig.from_pretrained(str(folder)).base_model_name_or_path


def load_merged(folder: str | Path, *, dtype: torch.dtype | str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The base model with the adapters of `folder` merged into its weights: a plain model.

    Args:
        dtype: of the weights; "auto" is that of the base model's files. Merging is done in float32.
    Raises:
        ValueError: adapters that are more than plain LoRA, or that do not fit the base model.
        FileNotFoundError: the base model is not where the adapters' configuration says.
    """
    settings = _plain_lora(folder)
    try:
        model = load_causal_lm(settings.base_model_name_or_path, dtype=dtype, trust_remote_code=trust_remote_code)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder}: the base model of these adapters is not there: {error}") from None
    wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False)
    adapters = LoRAAdapters(model, settings)
    tensors = load_file(Path(folder) / _TENSORS)
    problem = _misfit({name: tuple(tensor.shape) for name, tensor in tensors.items()}, adapters)
    if problem is not None:
        raise ValueError(f"{folder}: its adapters do not fit {settings.base_model_name_or_path}: {problem}")
    merged = {}
    for name, weight, factors in adapters.base_parameters():
        if factors:
            stem = _FILE_PREFIX + name.removesuffix("weight")
            merged[name] = adapters.merge(name, weight, [tensors[f"{stem}lora_{part}.weight"] for part in "AB"])
    plain = wrapped.unload()
    own = dict(plain.named_parameters())
    lost = sorted(merged.keys() - own.keys())
    if lost:
        raise ValueError(f"{folder}: adapters of {lost[0]} cannot be merged: the base model ties it to another tensor")
    for name, tensor in merged.items():
        own[name].data = tensor
    return plain


def _plain_lora(folder: str | Path) -> LoraConfig:
    settings = PeftConfig.from_pretrained(str(folder))
    if not isinstance(settings, LoraConfig):
        raise ValueError(f"{folder}: holds {settings.peft_type} adapters; only LoRA can be merged")
    extras = [
        name
        for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias")
        if getattr(settings, name)
    ]
    if extras or settings.bias != "none":
        raise ValueError(f"{folder}: its adapters use {', '.join(extras) or 'bias'}; only plain LoRA can be merged")
    return settings


def require_same_adapters(folder: Path, adapters: LoRAAdapters) -> None:
    """Raises RuntimeError unless the adapter folder holds tensors for exactly these adapters; reads no values."""
    with safe_open(folder / _TENSORS, framework="pt") as file:
        held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    problem = _misfit(held, adapters)
    if problem is not None:
        raise RuntimeError(f"{folder}: the checkpoint's adapters are not those of this run: {problem}")


def _misfit(held: Mapping[str, tuple[int, ...]], adapters: LoRAAdapters) -> str | None:
    """What is wrong with the names and shapes in a file, or None."""
    # A ZeRO-3 parameter is an empty shard here; its real shape stays in ds_shape.
    wanted = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in adapters.named_parameters()}
    different = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
    if not different:
        return None
    name = different[0]
    return (
        f"{len(different)} tensors differ, first {name}: the file has {held.get(name)}, the model needs "
        f"{wanted.get(name)}"
    )
