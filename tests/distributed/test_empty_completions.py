"""Case B06 in the trainer: micro-batches without a completion token, alone or beside full ones."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import run_ranks
from tests.tiny_models import tiny_llama

VARIANTS = {
    "whole": {"micro_batch_size": 4},
    "whole_token_mean": {"micro_batch_size": 4, "aggregation": "token_mean"},
    "single": {"micro_batch_size": 1},
    "single_token_mean": {"micro_batch_size": 1, "aggregation": "token_mean"},
    "single_dr_grpo": {"micro_batch_size": 1, "aggregation": "dr_grpo"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    tiny_llama(folder / "model")
    run_ranks("tests.distributed.empty_completions_rank", 1, str(folder), json.dumps(VARIANTS))
    return folder


@pytest.mark.stack
@pytest.mark.parametrize("name", VARIANTS)
def test_steps_without_completion_tokens_stay_finite(trained, name):
    """Nothing to reinforce and no supervised loss: the loss is 0 and no weight moves."""
    empty = json.loads((trained / f"{name}.json").read_text())["empty"]
    assert empty["loss"] == 0.0 and empty["rl_loss"] == 0.0 and empty["grad_norm"] == 0.0
    start = load_file(trained / "model" / "model.safetensors")
    weights = load_file(trained / f"{name}-empty.safetensors")
    for key, value in start.items():
        assert torch.equal(weights[key], value), key


@pytest.mark.stack
@pytest.mark.parametrize("aggregation", ["", "_token_mean"])
def test_empty_micro_batches_do_not_change_the_others(trained, aggregation):
    """Micro-batches of one: two of them hold no completion token. The step equals the one of the whole batch."""
    whole, single = (load_file(trained / f"{name}{aggregation}-mixed.safetensors") for name in ("whole", "single"))
    start = load_file(trained / "model" / "model.safetensors")
    assert not torch.equal(whole["lm_head.weight"], start.get("lm_head.weight", start["model.embed_tokens.weight"]))
    for key, value in whole.items():
        torch.testing.assert_close(single[key], value, atol=1e-5, rtol=0, msg=key)
