"""Loading the reward models of an engine and checking that they belong to its language model."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf_ebft.core.cpu_frozen import pack_frozen_model
from openrlhf_ebft.rad.engine.blocks import BLOCK
from openrlhf_ebft.rad.engine.config import RADEngineConfig, RewardModelConfig
from openrlhf_ebft.rad.engine.core import RADEngine
from openrlhf_ebft.rad.engine.scorer import PrefixScorer
from openrlhf_ebft.rad.loading import load_sequence_classifier
from openrlhf_ebft.rad.scoring_path import same_vocabulary


def start_engine(
    config: RADEngineConfig, *, lm_tokenizer: Any, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> RADEngine:
    """Loads every reward model and allocates its cache.

    Args:
        config: which ones.
        lm_tokenizer: the language model's tokenizer, or None when it has none.
        max_model_len: longest sequence of the engine, in tokens.
        dtype: of reward models whose configuration names none.
        device: where they run.

    Raises:
        ValueError: a reward model with another vocabulary, one that cannot be scored from a cache, a column that it
            does not have, or a cache that is too small for one request. The message names the reward model.
    """
    scorers = {}
    for name, model in config.reward_models.items():
        scorer = _load(name, model, config, lm_tokenizer, model.dtype or dtype, device)
        longest = max_model_len if scorer.max_length is None else min(max_model_len, scorer.max_length - 1)
        if scorer.pool.size * BLOCK < longest:
            raise ValueError(
                f"rad.cache_tokens={config.cache_tokens} (whole blocks: {scorer.pool.size * BLOCK}) cannot hold one "
                f"request of {longest} tokens; give at least {-(-longest // BLOCK) * BLOCK}"
            )
        if model.score_index >= scorer.columns:
            raise ValueError(
                f"rad.reward_models.{name}.score_index={model.score_index} is outside its {scorer.columns} output "
                "columns"
            )
        scorers[name] = scorer
    return RADEngine(config, scorers)


def _load(
    name: str,
    model: RewardModelConfig,
    config: RADEngineConfig,
    lm_tokenizer: Any,
    dtype: str | torch.dtype,
    device: torch.device,
) -> PrefixScorer:
    arguments: dict[str, Any] = {"dtype": getattr(torch, dtype) if isinstance(dtype, str) else dtype}
    if model.trust_remote_code:
        arguments["trust_remote_code"] = True
    reward_model, tokenizer = load_sequence_classifier(model.path, device, arguments)
    pack_frozen_model(reward_model)
    try:
        if not same_vocabulary(lm_tokenizer, tokenizer):
            raise ValueError(
                "its vocabulary differs from the language model's; in the engine candidates are scored by token id"
            )
        return PrefixScorer(
            reward_model,
            tokenizer,
            cache_tokens=config.cache_tokens,
            prefill_tokens=config.prefill_tokens,
            refuse_when_full=config.when_full == "error",
            verify=config.verify,
        )
    except ValueError as fault:
        raise ValueError(f"reward model {name!r} ({model.path}): {fault}") from fault
