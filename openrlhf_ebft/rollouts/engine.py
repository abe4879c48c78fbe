"""What every rollout engine offers, whatever samples underneath, and how one is built from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.distributed.weight_sync import Fetch, WeightUpdate
from openrlhf_ebft.rollouts.adapters import AdaptedModel


class RolloutEngine(Protocol):
    """Samples completions at anchors. Errors are raised, never turned into empty completions."""

    @property
    def weight_version(self) -> int:
        """Version of the last weight update that was applied completely; 0 before the first."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingSettings | None = None) -> list[Rollout]:
        """Samples all anchors of all requests; rollouts come in the order of the requests.

        `sampling` replaces the engine's own settings for this call (evaluation).

        Raises:
            ValueError: a request cannot be sampled (see `anchor_prompts`); nothing has been sampled then.
        """

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of given tokens under the engine's weights at temperature 1.

        Entry t of a sequence of L tokens is log p(token t+1 | tokens 0..t), so L - 1 numbers each.
        """

    def update_weights(self, update: WeightUpdate, fetch: Fetch = ...) -> None:
        """Replaces all weights and publishes the version; `fetch` resolves the update's handles.

        Raises:
            WeightSyncError: the update does not fit (old weights stay) or failed; either way it can be repeated.
        """

    def forget_prefixes(self) -> None:
        """Drops keys and values of earlier prompts, so that the next call does not depend on them."""

    def effective_settings(self) -> dict[str, Any]:
        """The values that are really in force, for the log."""

    def shutdown(self) -> None:
        """Releases the model and its memory."""


def build_engine(
    model: str | AdaptedModel,
    config: RolloutConfig,
    sampling: SamplingSettings,
    *,
    dtype: str,
    max_model_len: int,
    seed: int,
    threads: int,
    trust_remote_code: bool = False,
) -> RolloutEngine:
    """Builds the engine that `config.engine` names; only that engine's library is imported.

    Args:
        model: folder or hub name of the model, or a base model that gets adapters.
        config: the rollout section.
        sampling: every sampling field.
        dtype: precision of the engine's weights: float32, bfloat16 or float16.
        max_model_len: limit of prompt + completion, in tokens.
        seed: seed of the engine's own random state; completions use the seeds of their requests.
        threads: compute threads on CPU; 0 is all cores.
        trust_remote_code: run Python code shipped with the model.
    Raises:
        ValueError: engine auto, which a whole run's configuration resolves, or what the engine refuses.
    """
    if config.engine == "auto":
        raise ValueError("rollout.engine = auto depends on data.mode: name vllm or transformers")
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "seed": seed,
        "threads": threads,
        "trust_remote_code": trust_remote_code,
    }
    if config.engine == "vllm":
        from openrlhf_ebft.rollouts.vllm_engine import VLLMRolloutEngine

        return VLLMRolloutEngine(model, config, sampling, **settings)
    from openrlhf_ebft.rollouts.transformers_engine import TransformersRolloutEngine

    return TransformersRolloutEngine(model, config, sampling, **settings)
