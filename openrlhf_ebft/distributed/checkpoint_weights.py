"""Weights out of the trainer's own checkpoint folders, without starting a trainer."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.distributed.ema import read_average
from openrlhf_ebft.models.loading import DTYPES, load_causal_lm

CHECKPOINT_TAG = "deepspeed"
"""Folder inside a checkpoint that DeepSpeed writes."""
ADAPTER_FOLDER = "adapter"
"""Folder inside a checkpoint with the adapters as peft writes them."""
_MODEL = "model."  # the policy's name for its language model
_WRITTEN_BY_DEEPSPEED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def require_plain_files(folder: Path) -> None:
    """Raises ValueError when a checkpoint could run code while it is read.

    DeepSpeed reads its files with Python's unpickler, which makes any object and calls any function that a file names.
    So each file is first read by torch's restricted one, which takes tensors, plain values and the few classes that
    DeepSpeed writes. Tensors stay on disk meanwhile.

    Args:
        folder: what `PolicyTrainer.save_checkpoint` wrote.
    """
    for path in sorted((folder / CHECKPOINT_TAG).glob("*.pt")):
        try:
            with torch.serialization.safe_globals(_WRITTEN_BY_DEEPSPEED):
                torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            what = f"names {named[1]}" if named else "is no file of tensors"
            raise ValueError(
                f"{path} {what}: a checkpoint of the trainer holds tensors and plain values alone, so this is not one"
            ) from error


def save_checkpoint_model(folder: Path, config: EBFTConfig, out: Path, *, averaged: bool = False) -> None:
    """Writes the model of a checkpoint in which all weights train, in Hugging Face format and model.dtype.

    Args:
        folder: what `PolicyTrainer.save_checkpoint` wrote.
        config: of the run.
        out: existing folder.
        averaged: take the moving average of the weights (policy.ema_decay).
    Raises:
        ValueError: the checkpoint lacks weights of the model at model.path.
    """
    model = load_causal_lm(
        config.model.path,
        dtype=DTYPES[config.model.dtype],
        trust_remote_code=config.model.trust_remote_code,
    )
    state = _without_prefix(read_average(folder)) if averaged else _state(folder)
    own = dict(model.named_parameters())  # tied weights once
    missing = sorted(own.keys() - state.keys())
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of {config.model.path}, first {missing[0]}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name].view_as(parameter))
    model.save_pretrained(out)


def _state(folder: Path) -> dict[str, Tensor]:
    """Full tensors under Hugging Face names; under ZeRO-3 the float32 masters, since nothing else is whole."""
    require_plain_files(folder)
    whole = folder / CHECKPOINT_TAG / "mp_rank_00_model_states.pt"
    if whole.is_file():
        state = torch.load(whole, map_location="cpu", weights_only=True)["module"]
    else:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder), CHECKPOINT_TAG)
    return _without_prefix(state)


def _without_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_MODEL): tensor for name, tensor in state.items()}
