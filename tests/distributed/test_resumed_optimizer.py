"""Settings of the optimizer when a checkpoint is loaded into it."""

import pytest
import torch
from torch import nn

from openrlhf_ebft.config.sections import OptimizerConfig
from openrlhf_ebft.distributed.optimizer import build_optimizer, build_scheduler, keeping_settings


@pytest.mark.parametrize("rate", [3e-4, 7e-3])
def test_a_loaded_checkpoint_takes_over_moments_but_not_settings(rate):
    """With the same settings every value is the saved one, to the last bit; with others the new ones hold."""

    def build(learning_rate, weight_decay):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        config = OptimizerConfig(
            learning_rate=learning_rate, weight_decay=weight_decay, schedule="cosine", warmup_steps=2, betas=(0.8, 0.9)
        )
        optimizer = build_optimizer(model, config)
        return model, optimizer, build_scheduler(optimizer, config, 20)

    model, optimizer, scheduler = build(3e-4, 0.1)
    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    saved = optimizer.state_dict(), scheduler.state_dict()
    _, fresh, fresh_scheduler = build(rate, 0.2)
    with keeping_settings(fresh, fresh_scheduler):
        fresh.load_state_dict(saved[0])
        fresh_scheduler.load_state_dict(saved[1])
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.2, 0.0]
    assert fresh_scheduler.last_epoch == 5
    for group, old in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        assert group["lr"] == (old["lr"] if rate == 3e-4 else pytest.approx(old["lr"] * rate / 3e-4))
    fresh_scheduler.step()
    scheduler.step()
    assert fresh.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] * rate / 3e-4)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(fresh.state_dict()["state"][0][key], value)
