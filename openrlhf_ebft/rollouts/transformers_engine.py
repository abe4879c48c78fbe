"""Rollouts from a transformers model with a key/value cache: serves what vLLM does not, and checks what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.core.positions import position_limit
from openrlhf_ebft.distributed.device import local_device, set_compute_threads
from openrlhf_ebft.distributed.weight_sync import (
    ExpectedWeights,
    Fetch,
    WeightUpdate,
    check_chunks,
    check_manifest,
    fill_tied,
)
from openrlhf_ebft.models.loading import DTYPES, load_causal_lm
from openrlhf_ebft.models.lora import add_adapters
from openrlhf_ebft.models.split_attention import takes_split_attention
from openrlhf_ebft.rollouts.adapters import AdaptedModel, expected_adapters, split_model
from openrlhf_ebft.rollouts.anchor_prompts import anchor_prompts, check_token_ids, group_rollouts
from openrlhf_ebft.rollouts.block_parallel import BlockParallelSampler
from openrlhf_ebft.rollouts.expected_weights import expected_weights
from openrlhf_ebft.rollouts.row_sampler import RowSampler


class TransformersRolloutEngine:
    """One transformers model in this process; satisfies `RolloutEngine`.

    Models with a splittable attention sample all completions of a reference at once (`BlockParallelSampler`), others
    each completion in a row of its own (`RowSampler`).
    """

    def __init__(
        self,
        model: str | AdaptedModel,
        config: RolloutConfig,
        sampling: SamplingSettings,
        *,
        dtype: str,
        max_model_len: int,
        seed: int,
        threads: int,
        trust_remote_code: bool = False,
    ) -> None:
        """Loads the model. Arguments as in `build_engine`; every completion draws from its own seed, none from `seed`.

        Raises:
            ValueError: `max_model_len` is above what the model has positions for, a stop token is outside the
                vocabulary, or the configuration asks for a way of weight transfer that only vLLM has.
        """
        if config.weight_transfer not in ("auto", "object_store"):
            raise ValueError(
                f"rollout.weight_transfer={config.weight_transfer} is vLLM's; the transformers engine takes "
                "object_store (or auto)"
            )
        model_path, lora = split_model(model)
        set_compute_threads(threads)
        loaded = load_causal_lm(model_path, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
        self._adapters = None if lora is None else add_adapters(loaded, lora, seed=0)
        self._model = loaded.to(local_device()).eval()
        text_config = self._model.config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        positions = position_limit(text_config)
        if positions is not None and max_model_len > positions:
            raise ValueError(f"max_model_len={max_model_len} is more than the {positions} positions of {model_path}")
        check_token_ids(sampling.stop_token_ids, self._vocab_size, "stop_token_ids")
        is_split = takes_split_attention(self._model)
        self._sampler = BlockParallelSampler(self._model) if is_split else RowSampler(self._model)
        self._sampling = sampling
        self._max_model_len = max_model_len
        if self._adapters is None:
            self._expected = expected_weights(model_path, DTYPES[dtype], trust_remote_code=trust_remote_code)
        else:
            self._expected = expected_adapters(self._adapters, DTYPES[dtype])
        self._weight_version = 0

    @property
    def weight_version(self) -> int:
        """Version of the last weight update."""
        return self._weight_version

    @property
    def expected(self) -> ExpectedWeights:
        """The tensors that an update must carry."""
        return self._expected

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingSettings | None = None) -> list[Rollout]:
        """See `RolloutEngine.generate`. There is no prefix cache, so `cached_tokens` is 0."""
        prompts = anchor_prompts(requests, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        sampling = sampling or self._sampling
        check_token_ids(sampling.stop_token_ids, self._vocab_size, "stop_token_ids")
        if isinstance(self._sampler, BlockParallelSampler):
            completions = self._sampler.sample(requests, sampling)
        else:
            completions = self._sampler.sample(prompts, sampling)
        return group_rollouts(requests, completions, [0] * len(prompts), self._weight_version)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `RolloutEngine.score`."""
        scores = []
        for index, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= self._max_model_len:
                raise ValueError(
                    f"sequence {index} has {len(sequence)} tokens; the engine scores 1 to {self._max_model_len}"
                )
            check_token_ids(sequence, self._vocab_size, f"sequence {index}")
            ids = torch.tensor([list(sequence)], device=self._model.device)
            logprobs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
        return scores

    @torch.no_grad()
    def update_weights(self, update: WeightUpdate, fetch: Fetch = lambda chunk: chunk) -> None:
        """See `RolloutEngine.update_weights`. Everything is checked first; what follows only copies."""
        check_manifest(update.manifest, self._expected)
        chunks = [fetch(handle) for handle in update.chunks]
        check_chunks(chunks, update.manifest)
        if self._adapters is None:
            held: dict[str, Any] = self._model.state_dict(keep_vars=True)
        else:
            held = dict(self._adapters.named_parameters())
        for chunk in fill_tied(chunks, self._expected.tied):
            for name, tensor in chunk.items():
                held[name].copy_(tensor)
        self._weight_version = update.version

    def forget_prefixes(self) -> None:
        """Nothing: no keys or values outlive a call."""

    def effective_settings(self) -> dict[str, Any]:
        """Sampling fields and engine settings in force."""
        return {
            "sampling/temperature": self._sampling.temperature,
            "sampling/top_p": self._sampling.top_p,
            "sampling/top_k": self._sampling.top_k,
            "sampling/stop_token_ids": list(self._sampling.stop_token_ids),
            "engine/dtype": str(self._model.dtype).removeprefix("torch."),
            "engine/device": str(self._model.device),
            "engine/max_model_len": self._max_model_len,
            "engine/sampler": "block_parallel" if isinstance(self._sampler, BlockParallelSampler) else "rows",
            "engine/threads": torch.get_num_threads(),
        }

    def shutdown(self) -> None:
        """Releases the model."""
        del self._model, self._sampler
