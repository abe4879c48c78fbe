"""DeepSpeed's configuration, derived from ours."""

from __future__ import annotations

from typing import Any

from openrlhf_ebft.config.sections import EBFTConfig


def deepspeed_config(config: EBFTConfig) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` takes.

    The trainer decides itself when a step ends (`managed_gradient_accumulation` off), since the last batch of an epoch
    has fewer micro-batches; losses arrive normalised by global counts, so DeepSpeed must not scale them.
    """
    stage, dtype = config.deepspeed.zero_stage, config.model.dtype
    if stage == 0 and dtype != "float32":
        # DeepSpeed's optimizers that accumulate gradients in float32 go by the name of stage 1. Its float16 optimizer
        # of stage 0 adds them up in float16, reports their norm times the loss scale, and begins with a scale of 2^32.
        stage = 1
    zero: dict[str, Any] = {"stage": stage}
    if config.deepspeed.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Without it, stage 1 leaves a micro-batch's gradient in place and adds it again with the next one.
        "bf16": {"enabled": dtype == "bfloat16", "immediate_grad_update": stage == 1},
        # An overflow is a skipped step, and policy.max_nonfinite_steps in a row end the run: with 2^12 it takes
        # elements of the gradient above 16, and each overflow halves the scale.
        "fp16": {"enabled": dtype == "float16", "initial_scale_power": 12, "hysteresis": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
    }
