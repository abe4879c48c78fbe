"""Configuration of `openrlhf-ebft serve-rad`: every knob with its unit, default and range, written once."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from openrlhf_ebft.config.load import load_typed
from openrlhf_ebft.config.section import Precision, Section

ScoreTransform = Literal["none", "sigmoid", "softmax"]


class ServedModelConfig(Section):
    """The language model."""

    path: str | None = Field(None, description="model folder or hub name; null: the newest model of follow.run")
    name: str | None = Field(None, description="name that requests give; null: the last part of path or follow.run")
    dtype: Precision = Field("bfloat16", description="precision of weights and activations")
    max_length: int | None = Field(None, ge=2, description="tokens of prompt + completion; null: the model's own limit")


class RewardModelConfig(Section):
    """One reward model."""

    path: str = Field(description="folder or hub name of a sequence classifier with the language model's vocabulary")
    score_index: int = Field(0, ge=0, description="output column that is the reward")
    score_transform: ScoreTransform = Field(
        "sigmoid", description="transform of its outputs when a request names none: none, sigmoid or softmax"
    )


class RADServingConfig(Section):
    """Reward-augmented decoding inside the engine."""

    default_reward_model: str | None = Field(
        None, description="reward model of requests that name none; null: the first of reward_models"
    )
    cache_tokens: int = Field(16384, ge=1, description="prefix tokens whose keys and values are kept, per reward model")
    when_full: Literal["wait", "error"] = Field(
        "wait", description="a request without room in the cache: wait scores it slower, error ends it"
    )
    verify: bool = Field(False, description="compare every score with a full forward of its prefix (slow)")


class ServingEngineConfig(Section):
    """The vLLM engine of a replica."""

    tensor_parallel_size: int = Field(
        1, ge=1, description="ranks that share the language model of one engine: GPUs, or processes on CPU"
    )
    gpu_memory_utilization: float = Field(0.8, gt=0.0, le=1.0, description="share of a GPU's memory (GPU only)")
    kv_cache_gib: float = Field(1.0, gt=0.0, description="key/value cache in GiB (CPU only)")
    max_num_seqs: int = Field(64, ge=1, description="sequences that the engine decodes at once")
    enforce_eager: bool = Field(False, description="no CUDA graphs; on CPU always true")
    prefix_caching: bool = Field(True, description="reuse the language model's keys and values of equal prefixes")


class HTTPConfig(Section):
    """Where the server listens and who may ask."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    api_keys_env: str | None = Field(
        None, min_length=1, description="environment variable with API keys, separated by commas"
    )
    api_keys_file: str | None = Field(None, min_length=1, description="file with API keys, one a line")
    allow_anonymous: bool = Field(False, description="listen on other addresses than this machine's without API keys")
    cors_origins: tuple[str, ...] = Field((), description="web origins whose pages may ask; empty: none")


class LimitsConfig(Section):
    """Largest request that is accepted; a larger one is refused by name."""

    body_bytes: int = Field(1048576, ge=1024, description="bytes of a request's body")
    prompt_tokens: int | None = Field(None, ge=1, description="tokens of a prompt; null: model.max_length")
    prompts: int = Field(8, ge=1, description="prompts in one completion request")
    n: int = Field(8, ge=1, description="choices for each prompt")
    max_tokens: int = Field(1024, ge=1, description="tokens of a completion; also what a chat request without it gets")
    top_k: int = Field(100, ge=1, description="candidates of reward-augmented decoding")
    logprobs: int = Field(20, ge=0, description="alternatives per token in the log-probabilities")
    queued_requests: int = Field(256, ge=1, description="requests that may wait for a replica; more get 503")


class ReplicasConfig(Section):
    """Copies of the server: Ray Serve's replicas and their autoscaling."""

    min: int = Field(1, ge=1, description="replicas at least")
    max: int = Field(1, ge=1, description="replicas at most; above min Ray Serve follows the load")
    ongoing_requests: int = Field(64, ge=1, description="requests that one replica runs or holds at once")
    target_ongoing_requests: int = Field(16, ge=1, description="requests per replica that the autoscaler aims at")
    cpus: float = Field(1.0, gt=0.0, description="CPUs that Ray sets aside for a replica")
    threads: int = Field(0, ge=0, description="compute threads of a rank; 0: its share of the machine's cores")
    drain_s: float = Field(120.0, gt=0.0, description="limit for running requests to finish at shutdown, in seconds")
    start_s: float = Field(600.0, gt=0.0, description="limit for a replica to load its models, in seconds")


class FollowConfig(Section):
    """Serving the newest model of a training run."""

    run: str | None = Field(None, description="run directory such as runs/NAME; null: the model never changes")
    poll_s: float = Field(5.0, gt=0.0, description="seconds between two looks for a newer model")


class ServingPlacementConfig(Section):
    """The Ray cluster."""

    ray_address: str | None = Field(None, description="HOST:PORT of a cluster; null: RAY_ADDRESS, else a local one")


class ServingConfig(Section):
    """A RAD server."""

    reward_models: dict[str, RewardModelConfig] = Field(
        min_length=1, description="reward models by the name that requests give, as {NAME: {path: FOLDER}}"
    )
    model: ServedModelConfig = Field(default_factory=ServedModelConfig)
    rad: RADServingConfig = Field(default_factory=RADServingConfig)
    engine: ServingEngineConfig = Field(default_factory=ServingEngineConfig)
    http: HTTPConfig = Field(default_factory=HTTPConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    follow: FollowConfig = Field(default_factory=FollowConfig)
    placement: ServingPlacementConfig = Field(default_factory=ServingPlacementConfig)

    @property
    def model_name(self) -> str:
        """The name that requests give for the language model."""
        return self.model.name or Path(self.follow.run or self.model.path or "").name

    @property
    def default_reward_model(self) -> str:
        """The reward model of requests that name none."""
        return self.rad.default_reward_model or next(iter(self.reward_models))


def load_serving_config(path: str | Path, overrides: Sequence[str] = ()) -> ServingConfig:
    """Reads a file, applies `--section.key value` flags and checks the result.

    Raises:
        ConfigError: names every fault found, with the file's line or the flag and what is allowed.
    """
    return load_typed(ServingConfig, path, overrides, check_serving_rules)


def check_serving_rules(config: ServingConfig) -> list[str]:
    """One sentence for each broken rule between keys."""
    problems = []
    if config.model.path is None and config.follow.run is None:
        problems.append("model.path: missing; give it, or follow.run to serve the newest model of a run")
    if config.rad.default_reward_model is not None and config.rad.default_reward_model not in config.reward_models:
        problems.append(
            f"rad.default_reward_model = {config.rad.default_reward_model!r}: must be one of reward_models: "
            f"{', '.join(config.reward_models)}"
        )
    for name in config.reward_models:
        if not name or any(character in name for character in "=,") or not name.isprintable():
            problems.append(f"reward_models: the name {name!r} must be printable text without '=' and ','")
    if config.replicas.max < config.replicas.min:
        problems.append(f"replicas.max = {config.replicas.max} must be at least replicas.min = {config.replicas.min}")
    http = config.http
    if not (_is_loopback(http.host) or http.api_keys_env or http.api_keys_file or http.allow_anonymous):
        problems.append(
            f"http.host = {http.host!r} can be reached from other machines: set http.api_keys_file or "
            "http.api_keys_env, or http.allow_anonymous to true"
        )
    if "*" in http.cors_origins and not (http.api_keys_env or http.api_keys_file or http.allow_anonymous):
        problems.append("http.cors_origins = ['*'] lets every web page ask: set API keys or http.allow_anonymous")
    return problems


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
