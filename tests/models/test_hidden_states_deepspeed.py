"""extract_hidden_states through a real DeepSpeed engine, also between its steps. One process per ZeRO stage."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run_engine(stage: int) -> None:
    import deepspeed
    from transformers import AutoModelForCausalLM

    from openrlhf_ebft.models.hidden_states import extract_hidden_states
    from tests.models.families import CONFIGS, build, padded_batch

    deepspeed.init_distributed(dist_backend="gloo")
    model = build(AutoModelForCausalLM, CONFIGS["llama"])
    ids, mask = padded_batch("left")
    with torch.no_grad():
        right = torch.cat(model(ids, mask, output_hidden_states=True).hidden_states, dim=-1)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},  # weights stay, so that the states must, too
        },
    )
    for _ in range(2):
        states = extract_hidden_states(engine, ids, mask, list(range(5)), batch_size=2)
        torch.testing.assert_close(states, right, atol=1e-5, rtol=1e-5)
        partial = extract_hidden_states(engine, ids, mask, [2])
        torch.testing.assert_close(partial, right.chunk(5, dim=-1)[2], atol=1e-5, rtol=1e-5)
        engine.train()
        engine.backward(engine(input_ids=ids, attention_mask=mask, labels=ids).loss)
        engine.step()
    torch.distributed.destroy_process_group()


@pytest.mark.stack
@pytest.mark.parametrize("stage", [0, 3])
def test_through_an_engine(stage):
    settings = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": str(29700 + stage), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(stage)]
    result = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]


if __name__ == "__main__":
    run_engine(int(sys.argv[1]))
