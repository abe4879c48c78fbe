"""Sampling for models whose attention cannot be split: every completion a row of its own behind its prompt's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf_ebft.core.experience import Completion, SamplingSettings
from openrlhf_ebft.rollouts.anchor_prompts import AnchorPrompt
from openrlhf_ebft.rollouts.sampling import draw_tokens, draw_uniforms

# Completions that are sampled together; bounds the key/value cache and the logits of a step.
_MAX_ROWS = 64


class RowSampler:
    """Each prompt is prefilled once, left-padded in a batch, and its cache repeated for its samples.

    Models that number positions themselves, padding included, get prompts of one length at a time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._takes_padding = self._is_alike_padded()

    @torch.no_grad()
    def _is_alike_padded(self) -> bool:
        """Whether a short prompt is continued alike alone and padded beside a longer one."""
        vocabulary = self._model.config.get_text_config().vocab_size
        ids = [place % vocabulary for place in range(3, 11)]
        short, long = (AnchorPrompt("probe", 0, tokens, 1, 1, 0) for tokens in (ids[:3], ids))
        alone, padded = (self._prefill(prompts, 1)[0][0].float() for prompts in ([short], [short, long]))
        return bool((padded - alone).norm() <= 3e-2 * alone.norm())  # rounding in bfloat16, and no other position

    def sample(self, prompts: Sequence[AnchorPrompt], sampling: SamplingSettings) -> list[tuple[Completion, ...]]:
        """Completions of every prompt, in the order of the prompts."""
        completions: list[tuple[Completion, ...]] = [()] * len(prompts)
        for batch in _batches(prompts, one_length=not self._takes_padding):
            for index, group in zip(batch, self._sample([prompts[i] for i in batch], sampling), strict=True):
                completions[index] = group
        return completions

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
            picked, chosen = draw_tokens(logits, uniforms[:, step], sampling)
            tokens[:, step], logprobs[:, step] = picked.cpu(), chosen.cpu()
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
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ValueError(
                f"model type {self._model.config.model_type!r} gives back no cache of keys, values and states to go on "
                "from: set rollout.engine to vllm"
            )
        cache.batch_repeat_interleave(samples)
        return output.logits[:, -1].repeat_interleave(samples, 0), cache, mask.repeat_interleave(samples, 0)


def _batches(prompts: Sequence[AnchorPrompt], *, one_length: bool = False) -> list[list[int]]:
    """Groups indices of prompts: one number of samples each, prompts of similar length, at most `_MAX_ROWS` rows."""

    def kind(index: int) -> tuple[int, int]:
        return prompts[index].num_samples, len(prompts[index].token_ids) if one_length else 0

    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].num_samples, len(prompts[i].token_ids), i))
    batches: list[list[int]] = []
    for index in order:
        samples = prompts[index].num_samples
        current = batches[-1] if batches else []
        if current and kind(current[0]) == kind(index) and (len(current) + 1) * samples <= _MAX_ROWS:
            current.append(index)
        else:
            batches.append([index])
    return batches
