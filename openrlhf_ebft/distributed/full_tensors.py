"""The policy's tensors in full, under the names of its files, whatever way DeepSpeed shards them.

Everything here is collective under ZeRO-3: all ranks read the same stream to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import deepspeed
import torch
from torch import Tensor, nn

from openrlhf_ebft.distributed.weight_sync import TensorSpec, dtype_name
from openrlhf_ebft.models.policy import PolicyModel

NamedParameters = Iterator[tuple[str, nn.Parameter, list[nn.Parameter]]]
"""(name, parameter, factors of an adapter that changes it)."""


def full_weights(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """All weights under Hugging Face names, adapters merged in; tied ones under each of their names.

    A merged weight is a new tensor: the base model's own is never written to.
    """
    for name, parameter, factors in _weights(policy):
        with _gathered([parameter, *factors]) as is_copied:
            if factors:
                tensor = policy.adapters.merge(name, parameter, factors)
            else:
                tensor = parameter.detach().clone() if is_copied else parameter.detach()
        yield name, tensor


def full_adapters(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """The adapters' tensors under peft's names."""
    for name, parameter in policy.adapters.named_parameters():
        with _gathered([parameter]) as is_copied:
            tensor = parameter.detach().clone() if is_copied else parameter.detach()
        yield name, tensor


def weight_specs(policy: PolicyModel, dtype: torch.dtype) -> list[TensorSpec]:
    """Names and full shapes of `full_weights`, as tensors of `dtype`, without gathering anything."""
    return [
        TensorSpec(name, tuple(getattr(parameter, "ds_shape", parameter.shape)), dtype_name(dtype))
        for name, parameter, _ in _weights(policy)
    ]


def _weights(policy: PolicyModel) -> NamedParameters:
    if policy.adapters is not None:
        yield from policy.adapters.base_parameters()
        return
    for name, parameter in policy.model.named_parameters(remove_duplicate=False):
        yield name, parameter, []


@contextmanager
def _gathered(parameters: Sequence[nn.Parameter]) -> Iterator[bool]:
    """Inside the `with` block the parameters are whole; True if their memory is taken away afterwards."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        yield False
        return
    with deepspeed.zero.GatheredParameters(sharded):
        yield True
