"""From sampling settings to vLLM's parameters, and from vLLM's outputs to completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_ebft.core.experience import Completion, SamplingSettings
from openrlhf_ebft.rollouts.anchor_prompts import AnchorPrompt

# vLLM raises lower temperatures to this one with no more than a warning, which would belie the log-probabilities.
LOWEST_TEMPERATURE = 0.01
# Fields that shape the distribution; seed, count and length differ per request.
LOGGED_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
)


def check_temperature(sampling: SamplingSettings) -> None:
    """Raises ValueError for a temperature that vLLM would replace."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"rollout.temperature={sampling.temperature}: vLLM samples at {LOWEST_TEMPERATURE} instead; "
            f"use 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )


def prompt_params(prompt: AnchorPrompt, sampling: SamplingSettings) -> Any:
    """Sampling parameters of one anchor; vLLM gives sample i of a request the seed `seed + i`.

    Greedy samples are all the same, and vLLM refuses to compute them more than once.
    """
    num_samples = prompt.num_samples if sampling.temperature > 0 else 1
    return sampling_params(sampling, num_samples=num_samples, seed=prompt.seed, max_new_tokens=prompt.max_new_tokens)


def sampling_params(sampling: SamplingSettings, *, num_samples: int = 1, seed: int = 0, max_new_tokens: int = 1) -> Any:
    """Sets every field that shapes a distribution, so that no default of vLLM or of a model folder decides."""
    from vllm import SamplingParams

    return SamplingParams(
        n=num_samples,
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        stop=None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the stop tokens above are the only ones
        min_tokens=0,
        max_tokens=max_new_tokens,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        logit_bias=None,
        allowed_token_ids=None,
        bad_words=None,
    )


def completions_of(samples: Sequence[Any], prompt: AnchorPrompt, *, greedy: bool) -> tuple[Completion, ...]:
    """Turns the outputs of one request into its completions, see `_completion`; a greedy one stands for all."""
    completions = tuple(_completion(sample, prompt) for sample in samples)
    return completions * prompt.num_samples if greedy else completions


def _completion(sample: Any, prompt: AnchorPrompt) -> Completion:
    """Turns one vLLM output into a record, token by token as sampled.

    Raises:
        RuntimeError: the sample was aborted or came back without tokens.
    """
    token_ids = tuple(sample.token_ids)
    if sample.finish_reason not in ("stop", "length") or not token_ids:
        raise RuntimeError(
            f"{prompt}: vLLM returned {len(token_ids)} tokens with finish reason {sample.finish_reason!r}"
        )
    logprobs = tuple(entry[token].logprob for entry, token in zip(sample.logprobs, token_ids, strict=True))
    return Completion(token_ids, logprobs, sample.finish_reason)
