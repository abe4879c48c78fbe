"""AdamW's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from openrlhf_ebft.config.sections import OptimizerConfig

_SETTINGS = ("betas", "eps", "weight_decay", "initial_lr")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) get no weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    # A ZeRO-3 parameter is an empty shard here; its real shape stays in ds_shape.
    is_matrix = [len(getattr(p, "ds_shape", p.shape)) > 1 for p in trainable]
    groups = [
        {"params": [p for p, m in zip(trainable, is_matrix, strict=True) if m], "weight_decay": config.weight_decay},
        {"params": [p for p, m in zip(trainable, is_matrix, strict=True) if not m], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def count_warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Warm-up in optimizer steps: `warmup_steps`, or `warmup_ratio` of all steps, rounded up."""
    # Exact arithmetic: in floating point 0.07 * 100 is above 7 and would round up to 8.
    return config.warmup_steps or math.ceil(Fraction(str(config.warmup_ratio)) * total_steps)


def schedule_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 0) as a share of the peak.

    Linear warm-up of w steps reaches the peak at step w; linear and cosine decay reach `min_lr_ratio` at the last
    step, total_steps - 1.
    """
    warmup = count_warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    span = max(total_steps - 1 - warmup, 1)
    progress = min((step - warmup) / span, 1.0)
    decay = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    """Steps once for every applied optimizer step."""
    return LambdaLR(optimizer, lambda step: schedule_factor(step, config, total_steps))


@contextmanager
def keeping_settings(optimizer: Any, scheduler: LambdaLR) -> Iterator[None]:
    """While a checkpoint is loaded: learning rate, betas, epsilon and weight decay stay those of the configuration.

    A checkpoint holds those of the run that wrote it. Where they are the same, nothing changes, to the last bit.
    """
    settings = [{name: group[name] for name in _SETTINGS} for group in optimizer.param_groups]
    base_rates = list(scheduler.base_lrs)
    yield
    scheduler.base_lrs = base_rates
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    for group, values, base, factor in zip(optimizer.param_groups, settings, base_rates, factors, strict=True):
        group.update(values, lr=base * factor)
