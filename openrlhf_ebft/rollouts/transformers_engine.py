"""Rollouts from a transformers model with a key/value cache: serves what vLLM does not, and checks what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import Completion, Rollout, RolloutRequest, SamplingSettings
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
from openrlhf_ebft.rollouts.anchor_prompts import AnchorPrompt, anchor_prompts, check_token_ids, group_rollouts
from openrlhf_ebft.rollouts.expected_weights import expected_weights
from openrlhf_ebft.rollouts.sampling import draw_uniforms, pick_tokens, sampler_logprobs

# Completions that are sampled together; bounds the key/value cache and the logits of a step.
_MAX_ROWS = 64


class TransformersRolloutEngine:
    """One transformers model in this process; satisfies `RolloutEngine`.

    Each prompt is prefilled once, left-padded in a batch, and its cache repeated for its samples.
    """

    def __init__(
        self,
        model_path: str,
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
        set_compute_threads(threads)
        model = load_causal_lm(model_path, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
        self._model = model.to(local_device()).eval()
        text_config = self._model.config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        positions = text_config.max_position_embeddings
        if max_model_len > positions:
            raise ValueError(f"max_model_len={max_model_len} is more than the {positions} positions of {model_path}")
        check_token_ids(sampling.stop_token_ids, self._vocab_size, "stop_token_ids")
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._expected = expected_weights(model_path, DTYPES[dtype], trust_remote_code=trust_remote_code)
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
        completions: list[tuple[Completion, ...]] = [()] * len(prompts)
        for batch in _batches(prompts):
            for index, group in zip(batch, self._sample([prompts[i] for i in batch], sampling), strict=True):
                completions[index] = group
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
        held = self._model.state_dict(keep_vars=True)
        for chunk in fill_tied(chunks, self._expected.tied):
            for name, tensor in chunk.items():
                held[name].copy_(tensor)
        self._weight_version = update.version

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
            "engine/max_rows": _MAX_ROWS,
            "engine/threads": torch.get_num_threads(),
        }

    def shutdown(self) -> None:
        """Releases the model."""
        del self._model

    @torch.no_grad()
    def _sample(self, prompts: list[AnchorPrompt], sampling: SamplingSettings) -> list[tuple[Completion, ...]]:
        """Samples all completions of prompts that have the same number of samples: R = prompts x samples rows."""
        samples = prompts[0].num_samples
        limits = torch.tensor([prompt.max_new_tokens for prompt in prompts]).repeat_interleave(samples)  # (R,)
        steps = int(limits.max())
        uniforms = draw_uniforms([prompt.seed + s for prompt in prompts for s in range(samples)], steps)
        stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)

        logits, cache, mask = self._prefill(prompts, samples)
        tokens = torch.zeros(len(limits), steps, dtype=torch.int64)
        logprobs = torch.zeros(len(limits), steps)
        lengths = torch.zeros_like(limits)
        stopped = torch.zeros(len(limits), dtype=torch.bool)
        for step in range(steps):
            distribution = sampler_logprobs(logits, sampling)
            picked = pick_tokens(distribution, uniforms[:, step], sampling)
            tokens[:, step] = picked.cpu()
            logprobs[:, step] = distribution.gather(1, picked[:, None])[:, 0].cpu()
            running = ~stopped & (lengths < limits)
            lengths += running
            stopped |= running & torch.isin(tokens[:, step], stop)
            if bool((stopped | (lengths >= limits)).all()):
                break
            mask = torch.cat([mask, mask.new_ones(len(limits), 1)], dim=1)
            output = self._model(
                input_ids=picked[:, None],
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            )
            logits = output.logits[:, -1]
        flat = [
            Completion(
                tuple(tokens[row, :length].tolist()),
                tuple(logprobs[row, :length].tolist()),
                "stop" if stopped[row] else "length",
            )
            for row, length in enumerate(lengths.tolist())
        ]
        return [tuple(flat[start : start + samples]) for start in range(0, len(flat), samples)]

    def _prefill(self, prompts: list[AnchorPrompt], samples: int) -> tuple[Tensor, Any, Tensor]:
        """Runs the prompts once and repeats what came out for every sample.

        Returns:
            logits after the last prompt token (R, vocabulary), key/value cache of R rows, attention mask (R, longest)
            int64 with zeros on the left of shorter prompts.
        """
        device = self._model.device
        longest = max(len(prompt.token_ids) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, longest - len(prompt.token_ids) :] = 1
        mask = mask.to(device)
        output = self._model(
            input_ids=ids.to(device),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        cache.batch_repeat_interleave(samples)
        return output.logits[:, -1].repeat_interleave(samples, 0), cache, mask.repeat_interleave(samples, 0)


def _batches(prompts: Sequence[AnchorPrompt]) -> list[list[int]]:
    """Groups indices of prompts: one number of samples each, prompts of similar length, at most `_MAX_ROWS` rows."""
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].num_samples, len(prompts[i].token_ids), i))
    batches: list[list[int]] = []
    for index in order:
        samples = prompts[index].num_samples
        current = batches[-1] if batches else []
        if current and prompts[current[0]].num_samples == samples and (len(current) + 1) * samples <= _MAX_ROWS:
            current.append(index)
        else:
            batches.append([index])
    return batches
