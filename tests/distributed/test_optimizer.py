"""Which parameters decay, and how long the warm-up is."""

import pytest

from openrlhf_ebft.config.sections import OptimizerConfig
from openrlhf_ebft.distributed.optimizer import build_optimizer, count_warmup_steps, schedule_factor
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen2


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2, tiny_gpt2])
def test_norms_and_biases_do_not_decay_and_everything_else_does(tmp_path, build):
    model = build(tmp_path)
    first = next(model.parameters()).requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert id(first) not in decay and len(decay) == len(trainable)
    for name, parameter in trainable.items():
        is_left_out = "norm" in name or ".ln_" in name or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if is_left_out else 0.1), name
    assert {0.0, 0.1} == set(decay.values())


@pytest.mark.parametrize(
    ("settings", "total", "steps"),
    [
        ({}, 100, 0),
        ({"warmup_steps": 5}, 100, 5),
        ({"warmup_ratio": 0.07}, 100, 7),  # in floating point 0.07 * 100 is above 7
        ({"warmup_ratio": 0.1}, 23, 3),
        ({"warmup_ratio": 1.0}, 4, 4),
    ],
)
def test_length_of_the_warm_up(settings, total, steps):
    config = OptimizerConfig(**settings)
    assert count_warmup_steps(config, total) == steps
    factors = [schedule_factor(step, config, total) for step in range(total)]
    assert factors == pytest.approx([min((step + 1) / (steps + 1), 1.0) for step in range(total)])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_share_and_a_number_of_steps_give_the_same_schedule(schedule):
    by_ratio = OptimizerConfig(schedule=schedule, warmup_ratio=0.25, min_lr_ratio=0.1)
    by_steps = OptimizerConfig(schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    for step in range(8):
        assert schedule_factor(step, by_ratio, 8) == schedule_factor(step, by_steps, 8)
    assert schedule_factor(7, by_ratio, 8) == pytest.approx(0.1)
