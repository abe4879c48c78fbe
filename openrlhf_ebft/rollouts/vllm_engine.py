"""Rollouts from vLLM, token ids in and token ids out, in the calling process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.distributed.weight_sync import (
    Chunk,
    ExpectedWeights,
    Fetch,
    TensorSpec,
    WeightSyncError,
    WeightUpdate,
    check_chunks,
    check_manifest,
    fill_tied,
)
from openrlhf_ebft.rollouts.adapters import AdaptedModel, empty_adapters, expected_adapters, split_model
from openrlhf_ebft.rollouts.anchor_prompts import anchor_prompts, check_token_ids, group_rollouts
from openrlhf_ebft.rollouts.expected_weights import expected_weights
from openrlhf_ebft.rollouts.vllm_adapter import AdapterSlot, adapter_arguments
from openrlhf_ebft.rollouts.vllm_launch import (
    engine_arguments,
    plain_eager,
    prepare_environment,
    start_vllm,
    transfer_backend,
)
from openrlhf_ebft.rollouts.vllm_sampling import (
    LOGGED_FIELDS,
    check_temperature,
    completions_of,
    prompt_params,
    sampling_params,
)


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
        """Loads the model. Arguments as in `build_engine`.

        Raises:
            RuntimeError: this process has a vLLM engine already.
            ValueError: a .gguf file, a temperature or block size that vLLM would change or refuse, a stop token
                outside the vocabulary, weight_transfer that the device cannot do, or a model without adapters in vLLM.
        """
        model_path, lora = split_model(model)
        if VLLMRolloutEngine._alive:
            raise RuntimeError("this process has one vLLM engine already; shut it down first, or use another process")
        if model_path.endswith(".gguf"):
            raise ValueError(
                f"{model_path}: vLLM would keep a .gguf file's weights quantised, which cannot be updated; write a "
                "safetensors folder first (openrlhf-ebft prepare-model), or use rollout.engine=transformers"
            )
        check_temperature(sampling)
        prepare_environment(threads)
        from vllm.platforms import current_platform

        self._on_cpu = current_platform.is_cpu()
        self._sampling = sampling
        self._backend = transfer_backend(config, self._on_cpu) if lora is None else "object_store"
        arguments = engine_arguments(config, self._on_cpu) | ({} if lora is None else adapter_arguments(lora))
        arguments |= {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed % 2**32,
            "trust_remote_code": trust_remote_code,
        }
        if lora is None:
            expected = expected_weights(model_path, getattr(torch, dtype), trust_remote_code=trust_remote_code)
        else:
            adapters = empty_adapters(model_path, lora, trust_remote_code=trust_remote_code)
            expected = expected_adapters(adapters, getattr(torch, dtype))
        try:
            self._llm = start_vllm(model_path, arguments, self._backend)
        except ValueError as error:
            if lora is None or "LoRA" not in str(error):
                raise
            hint = "set lora.sync to merged, or rollout.engine to transformers"
            raise ValueError(f"{model_path}: {error} For lora.sync = adapter that is needed: {hint}") from error
        self._adapter = None if lora is None else AdapterSlot(self._llm, adapters, model_path)
        VLLMRolloutEngine._alive = True
        self._vocab_size: int = self._llm.model_config.get_vocab_size()
        self._max_model_len = max_model_len
        self._arguments = arguments
        self._sleeps = bool(config.sleep)
        self._asleep = False
        self._torn_by: str | None = None  # why the weights are a mixture of two versions, if they are
        self._expected = expected
        try:
            self._check_sampling(sampling)
            self._llm.update_weight_version("0")
            if self._backend == "object_store":
                self.connect_weight_transfer({})
            self._sleep()
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
            [prompt.token_ids for prompt in prompts], [prompt_params(prompt, sampling) for prompt in prompts]
        )
        completions = [
            completions_of(output.outputs, prompt, greedy=sampling.temperature == 0)
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
        params = sampling_params(SamplingSettings(temperature=0.0, top_p=1.0, top_k=0, stop_token_ids=()))
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
        if self._adapter is not None:
            self._switch_adapter(chunks, update.version)
            return
        chunks = fill_tied(chunks, self._expected.tied)
        self.begin_update(update.manifest)
        for index, chunk in enumerate(chunks):
            self.receive({"tensors": chunk, "last": index == len(chunks) - 1})
        self.finish_update(update.version)

    def connect_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the transfer group of the backend; for nccl this blocks until the trainer has joined too."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def begin_update(self, manifest: Sequence[TensorSpec]) -> None:
        """Checks the manifest and starts an update, from scratch if an earlier one has failed or was left open."""
        check_manifest(manifest, self._expected)
        if self._torn_by is not None:
            self._llm.collective_rpc("abandon_update")
        self._wake()
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
            raise self._failed(error) from error

    def finish_update(self, version: int) -> None:
        """Ends the update, forgets the keys and values of the old weights, and publishes `version` last.

        Raises:
            WeightSyncError: vLLM could not finish or could not drop its prefix cache.
        """
        try:
            self._llm.finish_weight_update()
        except Exception as error:
            raise self._failed(error) from error
        if not self._llm.reset_prefix_cache():
            self._torn_by = "the prefix cache of the old weights is still in use by running requests"
            raise WeightSyncError(f"weight update {version}: {self._torn_by}; repeat it when no request is running")
        self._llm.update_weight_version(str(version))
        self._torn_by = None
        self._sleep()

    def forget_prefixes(self) -> None:
        """See `RolloutEngine.forget_prefixes`. Raises RuntimeError while requests are running."""
        if not self._asleep and not self._llm.reset_prefix_cache():  # an engine that sleeps has dropped them
            raise RuntimeError("the prefix cache is in use by running requests")

    def _switch_adapter(self, chunks: Sequence[Chunk], version: int) -> None:
        assert self._adapter is not None
        self._wake()
        try:
            self._adapter.switch({name: tensor for chunk in chunks for name, tensor in chunk.items()}, version)
        except Exception as error:
            raise WeightSyncError(
                f"vLLM refused the adapters, the old weights stay: {type(error).__name__}: {error}; "
                "with lora.sync = merged it gets whole weights instead"
            ) from error
        self._llm.update_weight_version(str(version))
        self._sleep()

    def _failed(self, error: Exception) -> WeightSyncError:
        """Keeps the engine from sampling until a complete update has been applied."""
        self._torn_by = f"{type(error).__name__}: {error}"
        return WeightSyncError(f"weight update failed in the engine, repeat it: {self._torn_by}")

    def effective_settings(self) -> dict[str, Any]:
        """Engine arguments and every sampling field as vLLM holds them; seed and length differ per request."""
        params = sampling_params(self._sampling)
        settings = {f"sampling/{field}": getattr(params, field) for field in LOGGED_FIELDS}
        settings |= {f"engine/{name}": value for name, value in self._arguments.items()}
        return settings | {"engine/weight_transfer": self._backend, "engine/threads": torch.get_num_threads()}

    def shutdown(self) -> None:
        """Stops vLLM's engine core and releases the model."""
        if self._adapter is not None:
            self._adapter.close()
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        VLLMRolloutEngine._alive = False

    def _run(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """Runs vLLM to the end; a failure leaves no half-finished request behind in its scheduler."""
        if self._torn_by is not None:
            raise WeightSyncError(f"the engine's weights are incomplete, update them first: {self._torn_by}")
        if not prompts:
            return []
        self._wake()
        try:
            with plain_eager(self._on_cpu):
                outputs = self._llm.generate(
                    [{"prompt_token_ids": ids} for ids in prompts],
                    params,
                    use_tqdm=False,
                    lora_request=None if self._adapter is None else self._adapter.request,
                )
        except BaseException:
            engine = self._llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
        self._sleep()
        return outputs

    def _sleep(self) -> None:
        """Gives the GPU's memory to the other roles (rollout.sleep): weights go to host memory, keys and values go."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        """Takes the memory back. Raises RuntimeError when vLLM stays partly asleep."""
        if not self._asleep:
            return
        if not self._llm.wake_up():
            raise RuntimeError("vLLM did not wake up completely from sleep mode")
        self._asleep = False

    def _check_sampling(self, sampling: SamplingSettings) -> None:
        check_temperature(sampling)
        check_token_ids(sampling.stop_token_ids, self._vocab_size, "stop_token_ids")
