"""The tensors that a model folder's architecture has, found without loading its weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf_ebft.distributed.weight_sync import ExpectedWeights, TensorSpec, dtype_name
from openrlhf_ebft.models.loading import causal_lm_arguments


def expected_weights(model_path: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> ExpectedWeights:
    """Builds the architecture on the meta device and lists its tensors as an engine of `dtype` holds them.

    The names are those of `state_dict()` on the trainer's side, and of the checkpoints that engines load.
    """
    name, extra = causal_lm_arguments(model_path)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    specs: dict[str, TensorSpec] = {}
    names_of: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        held = dtype if tensor.is_floating_point() else tensor.dtype
        specs[name] = TensorSpec(name, tuple(tensor.shape), dtype_name(held))
        names_of[id(tensor)].append(name)
    tied = tuple(tuple(names) for names in names_of.values() if len(names) > 1)
    return ExpectedWeights(specs, tied)
