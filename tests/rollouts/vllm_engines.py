"""Starting the real vLLM on tiny models and comparing it with transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.distributed.weight_sync import build_update
from openrlhf_ebft.rollouts.engine import RolloutEngine, build_engine
from tests.rollouts.requests import SAMPLED, token_logprobs

PROMPT = [3 + (5 * i) % 60 for i in range(70)]


def start(folder: Path, dtype: str = "float32", config: RolloutConfig | None = None) -> RolloutEngine:
    return build_engine(
        str(folder),
        config or RolloutConfig(kv_cache_gib=0.05, block_size=32),
        SAMPLED,
        dtype=dtype,
        max_model_len=96,
        seed=0,
        threads=1,
    )


def send(engine: RolloutEngine, model: PreTrainedModel, version: int, tensors=None) -> None:
    engine.update_weights(
        build_update(version, tensors or model.state_dict().items(), dtype=torch.float32, chunk_bytes=20_000)
    )


def error(engine: RolloutEngine, model: PreTrainedModel) -> float:
    """Largest difference of log-probabilities between the engine and the model on a fixed sequence."""
    scores = torch.tensor(engine.score([PROMPT])[0])
    return (scores - token_logprobs(model, PROMPT)).abs().max().item()
