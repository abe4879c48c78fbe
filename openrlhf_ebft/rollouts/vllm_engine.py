"""Rollouts from vLLM, token ids in and token ids out, in the calling process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import Completion, Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.distributed.weight_sync import (
    ExpectedWeights,
    Fetch,
    TensorSpec,
    WeightSyncError,
    WeightUpdate,
    check_chunks,
    check_manifest,
    fill_tied,
)
from openrlhf_ebft.rollouts.anchor_prompts import AnchorPrompt, anchor_prompts, check_token_ids, group_rollouts
from openrlhf_ebft.rollouts.expected_weights import expected_weights

# vLLM raises lower temperatures to this one with no more than a warning, which would belie the log-probabilities.
_LOWEST_TEMPERATURE = 0.01
# The CPU attention kernel works on blocks of this many tokens.
_CPU_BLOCK = 32
_MAX_ENGINE_SEED = 2**32


class VLLMRolloutEngine:
    """One vLLM engine in this process; satisfies `RolloutEngine`.

    Sampler log-probabilities are those of the distribution that was sampled from: logits / temperature, then top-k
    and top-p, renormalised. With both off they equal a trainer's log-softmax of logits / temperature. At temperature
    0 (greedy) they are the log-softmax of the plain logits.

    vLLM keeps process-wide state, so a process holds one engine at a time; after `shutdown` another may start.
    """

    _alive: ClassVar[bool] = False

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
        """Loads the model. Arguments as in `build_engine`.

        Raises:
            ValueError: a temperature or block size that vLLM would change or refuse, a stop token outside the
                vocabulary, or weight_transfer that the device cannot do.
        """
        if VLLMRolloutEngine._alive:
            raise RuntimeError("this process has one vLLM engine already; shut it down first, or use another process")
        _check_temperature(sampling)
        _prepare_environment(threads)
        from vllm.platforms import current_platform

        self._on_cpu = current_platform.is_cpu()
        self._sampling = sampling
        self._backend = _transfer_backend(config, self._on_cpu)
        arguments = _engine_arguments(config, self._on_cpu)
        arguments |= {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed % _MAX_ENGINE_SEED,
            "trust_remote_code": trust_remote_code,
        }
        expected = expected_weights(model_path, getattr(torch, dtype), trust_remote_code=trust_remote_code)
        self._llm = _start(model_path, arguments, self._backend)
        VLLMRolloutEngine._alive = True
        self._vocab_size: int = self._llm.model_config.get_vocab_size()
        self._max_model_len = max_model_len
        self._arguments = arguments
        self._torn_by: str | None = None  # why the weights are a mixture of two versions, if they are
        self._expected = expected
        try:
            self._check_sampling(sampling)
            self._llm.update_weight_version("0")
            if self._backend == "object_store":
                self.connect_weight_transfer({})
        except BaseException:
            self.shutdown()
            raise

    @property
    def weight_version(self) -> int:
        """Version of the last complete weight update, as vLLM reports it."""
        return int(self._llm.get_weight_version())

    @property
    def expected(self) -> ExpectedWeights:
        """The tensors that an update must carry."""
        return self._expected

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingSettings | None = None) -> list[Rollout]:
        """Samples every anchor: one vLLM request each, with all its samples. See `RolloutEngine.generate`.

        `cached_tokens` is what vLLM reports for a request: prompt tokens of the sample that finished last which
        came from the prefix cache, be they computed for an earlier anchor or for a sibling sample.
        """
        prompts = anchor_prompts(requests, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        sampling = sampling or self._sampling
        self._check_sampling(sampling)
        outputs = self._run(
            [prompt.token_ids for prompt in prompts], [_prompt_params(prompt, sampling) for prompt in prompts]
        )
        completions = [
            _completions(output.outputs, prompt, greedy=sampling.temperature == 0)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        cached = [output.num_cached_tokens or 0 for output in outputs]
        return group_rollouts(requests, completions, cached, self.weight_version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `RolloutEngine.score`. vLLM needs room for one more token than a sequence has.

        Raises:
            ValueError: a sequence is empty, too long, or holds an id outside the vocabulary.
        """
        for index, sequence in enumerate(sequences):
            if not 0 < len(sequence) < self._max_model_len:
                raise ValueError(
                    f"sequence {index} has {len(sequence)} tokens; the engine scores 1 to {self._max_model_len - 1}"
                )
            check_token_ids(sequence, self._vocab_size, f"sequence {index}")
        params = _sampling_params(SamplingSettings(temperature=0.0, top_p=1.0, top_k=0, stop_token_ids=()))
        params.prompt_logprobs = 0
        params.skip_reading_prefix_cache = True  # a cached prefix would have no log-probabilities
        outputs = self._run([list(sequence) for sequence in sequences], [params] * len(sequences))
        return [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], sequence[1:], strict=True)]
            for output, sequence in zip(outputs, sequences, strict=True)
        ]

    def update_weights(self, update: WeightUpdate, fetch: Fetch = lambda chunk: chunk) -> None:
        """See `RolloutEngine.update_weights`. Everything is fetched and checked before the first weight changes."""
        check_manifest(update.manifest, self._expected)
        chunks = [fetch(handle) for handle in update.chunks]
        check_chunks(chunks, update.manifest)
        chunks = fill_tied(chunks, self._expected.tied)
        self.begin_update(update.manifest)
        for index, chunk in enumerate(chunks):
            self.receive({"tensors": chunk, "last": index == len(chunks) - 1})
        self.finish_update(update.version)

    def connect_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the transfer group of the backend; for nccl this blocks until the trainer has joined too."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def begin_update(self, manifest: Sequence[TensorSpec]) -> None:
        """Checks the manifest and starts an update; for backends whose tensors do not come with the call."""
        check_manifest(manifest, self._expected)
        self._torn_by = "an update was started and not finished"
        self._llm.start_weight_update()

    def receive(self, update_info: dict[str, Any]) -> None:
        """Receives a part of the update that `begin_update` started; `update_info` is the backend's.

        Raises:
            WeightSyncError: vLLM failed; its text is in the message. The engine refuses to sample until a complete
                update has been applied.
        """
        try:
            self._llm.update_weights({"update_info": update_info})
        except Exception as error:
            self._torn_by = f"{type(error).__name__}: {error}"
            raise WeightSyncError(f"weight update failed in the engine, repeat it: {self._torn_by}") from error

    def finish_update(self, version: int) -> None:
        """Ends the update, forgets the keys and values of the old weights, and publishes `version` last.

        Raises:
            WeightSyncError: vLLM could not finish or could not drop its prefix cache.
        """
        try:
            self._llm.finish_weight_update()
        except Exception as error:
            self._torn_by = f"{type(error).__name__}: {error}"
            raise WeightSyncError(f"weight update failed in the engine, repeat it: {self._torn_by}") from error
        if not self._llm.reset_prefix_cache():
            self._torn_by = "the prefix cache of the old weights is still in use by running requests"
            raise WeightSyncError(f"weight update {version}: {self._torn_by}; repeat it when no request is running")
        self._llm.update_weight_version(str(version))
        self._torn_by = None

    def effective_settings(self) -> dict[str, Any]:
        """Engine arguments and every sampling field as vLLM holds them; seed and length differ per request."""
        params = _sampling_params(self._sampling)
        fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
        fields += ("frequency_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias")
        settings = {f"sampling/{field}": getattr(params, field) for field in fields}
        settings |= {f"engine/{name}": value for name, value in self._arguments.items()}
        return settings | {"engine/weight_transfer": self._backend, "engine/threads": torch.get_num_threads()}

    def shutdown(self) -> None:
        """Stops vLLM's engine core and releases the model."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        VLLMRolloutEngine._alive = False

    def _run(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """Runs vLLM to the end; a failure leaves no half-finished request behind in its scheduler."""
        if self._torn_by is not None:
            raise WeightSyncError(f"the engine's weights are incomplete, update them first: {self._torn_by}")
        if not prompts:
            return []
        try:
            with _plain_eager(self._on_cpu):
                return self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        except Exception:
            engine = self._llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    def _check_sampling(self, sampling: SamplingSettings) -> None:
        _check_temperature(sampling)
        check_token_ids(sampling.stop_token_ids, self._vocab_size, "stop_token_ids")


def _check_temperature(sampling: SamplingSettings) -> None:
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise ValueError(
            f"rollout.temperature={sampling.temperature}: vLLM samples at {_LOWEST_TEMPERATURE} instead; "
            f"use 0 (greedy) or at least {_LOWEST_TEMPERATURE}"
        )


def _prompt_params(prompt: AnchorPrompt, sampling: SamplingSettings) -> Any:
    """Sampling parameters of one anchor; vLLM gives sample i of a request the seed `seed + i`.

    Greedy samples are all the same, and vLLM refuses to compute them more than once.
    """
    num_samples = prompt.num_samples if sampling.temperature > 0 else 1
    return _sampling_params(sampling, num_samples=num_samples, seed=prompt.seed, max_new_tokens=prompt.max_new_tokens)


def _sampling_params(
    sampling: SamplingSettings, *, num_samples: int = 1, seed: int = 0, max_new_tokens: int = 1
) -> Any:
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


def _prepare_environment(threads: int) -> None:
    """Settings that vLLM reads from the environment, made before it is imported.

    The engine runs in this process (no engine-core process of its own), so weights are handed over without a copy
    and an error arrives as it was raised. In this mode vLLM binds no threads to cores; it keeps the number of
    torch threads when OMP_NUM_THREADS is set and goes down to one otherwise.
    """
    threads = threads or len(os.sched_getaffinity(0))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    torch.set_num_threads(threads)


def _transfer_backend(config: RolloutConfig, on_cpu: bool) -> str:
    if config.weight_transfer == "auto":
        return "object_store" if on_cpu else "nccl"
    if on_cpu and config.weight_transfer != "object_store":
        raise ValueError(
            f"rollout.weight_transfer={config.weight_transfer} needs a GPU; on CPU use object_store (or auto)"
        )
    return config.weight_transfer


def _engine_arguments(config: RolloutConfig, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments that the rollout section decides."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,  # token ids in and out: text is nobody's business here
        "generation_config": "vllm",  # the model folder's generation config must not change sampling
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager or on_cpu,
    }
    if not on_cpu:
        return arguments | {"gpu_memory_utilization": config.gpu_memory_utilization}
    if config.block_size % _CPU_BLOCK:
        raise ValueError(
            f"rollout.block_size={config.block_size}: on CPU vLLM needs a multiple of {_CPU_BLOCK}, "
            f"for example {_CPU_BLOCK * (config.block_size // _CPU_BLOCK + 1)}"
        )
    if config.tensor_parallel_size > 1:
        raise ValueError(f"rollout.tensor_parallel_size={config.tensor_parallel_size}: on CPU an engine has one worker")
    kv_bytes = int(config.kv_cache_gib * 2**30)
    return arguments | {"kv_cache_memory_bytes": kv_bytes, "distributed_executor_backend": "uni"}


def _start(model_path: str, arguments: dict[str, Any], backend: str) -> Any:
    """Starts vLLM; on CPU it replaces torch.set_num_threads for the whole process, which is undone here."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from openrlhf_ebft.rollouts.weight_receiver import WORKER_EXTENSION

    set_num_threads = torch.set_num_threads
    try:
        return LLM(
            model_path,
            worker_extension_cls=WORKER_EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=backend),
            **arguments,
        )
    finally:
        torch.set_num_threads = set_num_threads


def _plain_eager(on_cpu: bool) -> AbstractContextManager[Any]:
    """On CPU, keeps torch.compile out: one small function of vLLM's sampler costs 13 s of C++ compilation."""
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()


def _completions(samples: Sequence[Any], prompt: AnchorPrompt, *, greedy: bool) -> tuple[Completion, ...]:
    completions = tuple(_completion(sample, prompt) for sample in samples)
    return completions * prompt.num_samples if greedy else completions


def _completion(sample: Any, prompt: AnchorPrompt) -> Completion:
    """Turns vLLM's output into a record.

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
