"""Loading sequence classifiers as reward models, also for architectures without a classifier class of their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING

from openrlhf_ebft.core.cpu_linear import use_onednn_linears

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
# Arguments of from_pretrained that decide which config.json is read.
_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


def sequence_classifier_class(model_id: str | Path, **from_pretrained_kwargs: Any) -> type:
    """The class whose `from_pretrained` loads `model_id` as a sequence classifier.

    That is `AutoModelForSequenceClassification` where transformers knows a classifier for the architecture, otherwise
    a class built on the architecture's backbone with a linear `score` head on every position.

    Args:
        model_id: hub id or folder.
        **from_pretrained_kwargs: those that decide which configuration is read are passed on.

    Raises:
        OSError: no such model.
        ValueError: the configuration belongs to no architecture that transformers can build a backbone for.
    """
    hub = {name: value for name, value in from_pretrained_kwargs.items() if name in _HUB_ARGUMENTS}
    try:
        config = AutoConfig.from_pretrained(str(model_id), **hub)
    except OSError as fault:
        raise OSError(f"{model_id} is neither a folder with a model nor a model that the hub gave: {fault}") from fault
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or _has_remote_classifier(config, hub):
        return AutoModelForSequenceClassification
    return _built_classifier(config)


def _has_remote_classifier(config: PretrainedConfig, hub: dict[str, Any]) -> bool:
    remote = getattr(config, "auto_map", None) or {}
    return bool(hub.get("trust_remote_code")) and "AutoModelForSequenceClassification" in remote


def _built_classifier(config: PretrainedConfig) -> type[PreTrainedModel]:
    """A classifier class on the backbone of `config`: a head on every position."""
    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"no backbone is known for model type {config.model_type!r}; it cannot be a reward model")
    backbone = MODEL_MAPPING[type(config)]
    base = next(cls for cls in backbone.__mro__ if cls.__name__.endswith("PreTrainedModel"))
    name = backbone.__name__.removesuffix("Model") + "ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, base), {"__module__": __name__})


def load_sequence_classifier(
    model_id: str | Path,
    device: str | torch.device | None = None,
    hf_model_kwargs: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """A sequence classifier in eval mode and its tokenizer (None for a folder that holds none).

    The tokenizer pads on the right, with EOS when it has no pad token; a configuration without a pad id takes the
    tokenizer's. Scores of this package never depend on the pad id: they are read at the last real token.

    Args:
        model_id: hub id or folder.
        device: where to put the model; None leaves it on the CPU.
        hf_model_kwargs: extra arguments of `from_pretrained`; `trust_remote_code` only if given here.

    Raises:
        OSError: no such model.
        ValueError: an architecture without a backbone.

    Warns:
        UserWarning: the checkpoint holds no classifier head, so its scores are random until it is trained.
    """
    kwargs = dict(hf_model_kwargs or {})
    hub = {name: value for name, value in kwargs.items() if name in _HUB_ARGUMENTS}
    classifier = sequence_classifier_class(model_id, **kwargs)
    model, report = classifier.from_pretrained(str(model_id), output_loading_info=True, **kwargs)
    fresh = sorted(name for name in report["missing_keys"] if name.split(".")[0] in ("score", "classifier"))
    if fresh:
        warnings.warn(
            f"{model_id} holds no weights for {', '.join(fresh)}: its rewards are random until it is trained",
            UserWarning,
            stacklevel=2,
        )
    if device is not None:
        model = model.to(device)
    use_onednn_linears(model)
    if Path(model_id).is_dir() and not has_tokenizer(Path(model_id)):
        return model.eval(), None
    tokenizer = load_tokenizer(model_id, **hub)
    if model.config.pad_token_id is None and tokenizer.pad_token_id is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(model_id: str | Path, **hub_arguments: Any) -> Any:
    """The tokenizer of `model_id`, padding on the right, with EOS as pad token when it has none."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_id), **hub_arguments)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer
