"""Reward-augmented decoding as a custom logits processor of vLLM.

    LLM(model, logits_processors=["openrlhf_ebft.rad.vllm_processor:RADLogitsProcessor"],
        additional_config={"rad": {"reward_models": {"sentiment": {"path": folder}}}})
    SamplingParams(extra_args={"rad_beta": 10.0, "rad_top_k": 20})

The only file of the package's RAD part that knows vLLM; what it does lies in `openrlhf_ebft.rad.engine`. One class
serves both of vLLM's model runners, whose interfaces for logits processors differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from openrlhf_ebft.rad.engine.config import RADEngineConfig
from openrlhf_ebft.rad.engine.core import RADEngine
from openrlhf_ebft.rad.engine.engine_row import EngineRow
from openrlhf_ebft.rad.engine.request import RADRequest
from openrlhf_ebft.rad.engine.slots import SlotRows
from openrlhf_ebft.rad.engine.start import start_engine
from openrlhf_ebft.rad.loading import has_tokenizer, load_tokenizer

PROCESSOR = "openrlhf_ebft.rad.vllm_processor:RADLogitsProcessor"
WORKER_EXTENSION = "openrlhf_ebft.rad.vllm_processor.RADWorkerExtension"
logger = init_logger("vllm.rad")  # vLLM shows what its own loggers say


class RADLogitsProcessor(LogitsProcessor, LogitsProcessorV2):
    """Steers the requests of vLLM's batch that carry `rad_*` arguments; others are not touched.

    Every tensor-parallel rank runs it on the same logits and with a reward model of its own, so all come to the same
    tokens. Reward models and limits come from `additional_config["rad"]`, see `RADEngineConfig`.
    """

    _announced: ClassVar[RADEngineConfig | None] = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        device_or_state: torch.device | LogitsProcRequestState,
        is_pin_memory: bool | None = None,
    ) -> None:
        """Loads the reward models.

        Args:
            vllm_config: of the engine.
            device_or_state: the device (model runner V1), or the runner's request state (V2).
            is_pin_memory: given by V1, not needed.

        Raises:
            ValueError: the engine is set up in a way that RAD does not serve, or the `rad` entry is faulty.
        """
        check_engine(vllm_config)
        config = RADEngineConfig.from_additional_config(vllm_config.additional_config)
        self._state = None if isinstance(device_or_state, torch.device) else device_or_state
        self.engine: RADEngine = start_engine(
            config,
            lm_tokenizer=language_model_tokenizer(vllm_config),
            max_model_len=vllm_config.model_config.max_model_len,
            dtype=vllm_config.model_config.dtype,
            device=device_or_state if isinstance(device_or_state, torch.device) else device_or_state.device,
        )
        for sentence in self.engine.sizes():
            logger.info(sentence)
        # Another custom processor after this one might look at more than the best token.
        self._is_alone = len(vllm_config.model_config.logits_processors or ()) <= 1
        self._rows: dict[int, EngineRow] = {}  # V1: by place in the batch
        self._slots = SlotRows(self.engine)  # V2
        self.announce(config)

    @classmethod
    def announce(cls, config: RADEngineConfig) -> None:
        """Lets this process refuse requests for unknown reward models at admission.

        Done by itself where the engine runs in the process that takes requests; a front end with the engine in
        another process may call it.
        """
        cls._announced = config

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses a request with wrong `rad_*` arguments; the message names the argument."""
        request = RADRequest.from_extra_args(sampling_params.extra_args)
        if request is not None and cls._announced is not None:
            cls._announced.check_request(request)

    def is_argmax_invariant(self) -> bool:
        """False: greedy decoding changes too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows requests that join, leave and move in the batch."""
        if batch_update is None:
            return
        before = set(self._rows.values())
        process_dict_updates(self._rows, batch_update, self._joined)
        for row in before - set(self._rows.values()):
            self.engine.remove(row)

    def _joined(self, params: SamplingParams, prompt: list[int] | None, outputs: list[int]) -> EngineRow | None:
        request = RADRequest.from_extra_args(params.extra_args)
        if request is None:
            return None
        return self.engine.add(request, prompt, outputs, stop_ids(params), is_greedy=self._is_greedy(params))

    def _is_greedy(self, params: SamplingParams) -> bool:
        return self._is_alone and takes_the_best(params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """V2: a request takes the slot `req_idx`; returns whether it is to be steered."""
        request = RADRequest.from_extra_args(sampling_params.extra_args)
        is_greedy = self._is_greedy(sampling_params)
        return self._slots.occupy(req_idx, request, stop_ids(sampling_params), is_greedy=is_greedy)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Shifts the steered rows of logits [B, V] float32 in place; `ctx` is V2's."""
        rows = self._rows if ctx is None else self._served(ctx)
        if rows:
            self.engine.apply(logits, rows)
        return logits

    def _served(self, ctx: LogitsContext) -> dict[int, EngineRow]:
        """V2: the steered rows of a step. Without speculative decoding a request has one row, in the batch's order."""
        state = self._state
        assert state is not None
        slots = ctx.idx_mapping_np.tolist()
        lengths = ctx.seq_lens_upper_bound_np[: len(slots)].tolist()
        prompts = state.prompt_len.np[ctx.idx_mapping_np].tolist()

        def read(slot: int, start: int, end: int) -> list[int]:
            return state.all_token_ids.gpu[slot, start:end].tolist()

        rows = self._slots.serve(slots, lengths, prompts, read)
        # A prompt of which a part is still to come: what is sampled from its row is thrown away.
        whole = (ctx.seq_lens_upper_bound_np[: len(slots)] >= state.prefill_len.np[ctx.idx_mapping_np]).tolist()
        return {place: row for place, row in rows.items() if whole[place]}


class RADWorkerExtension:
    """What a driver may ask a worker by `collective_rpc`; pass WORKER_EXTENSION as `worker_extension_cls`."""

    model_runner: Any

    def rad_take_trace(self, trace_id: str) -> list[dict[str, Any]]:
        """The sequences recorded under `rad_trace=trace_id`, see `TraceStore.take`, and forgets them."""
        return _engine_of(self.model_runner).traces.take(trace_id)

    def rad_take_error(self, report_id: str) -> str | None:
        """Why the request with `rad_report=report_id` had to be ended, None if it was not, and forgets it."""
        return _engine_of(self.model_runner).errors.take(report_id)

    def rad_statistics(self) -> dict[str, Any]:
        """Totals since the start, see `RADEngine.statistics`."""
        return _engine_of(self.model_runner).statistics()


def _engine_of(model_runner: Any) -> RADEngine:
    for processor in _processors_of(model_runner):
        if isinstance(processor, RADLogitsProcessor):
            return processor.engine
    raise RuntimeError(f"this engine has no RAD: start it with logits_processors=[{PROCESSOR!r}]")


def _processors_of(model_runner: Any) -> Iterable[Any]:
    batch = getattr(model_runner, "input_batch", None)  # only model runner V1 keeps one
    return model_runner.sampler.logits_processors if batch is None else batch.logitsprocs.all


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise ValueError for an engine that cannot be steered token by token; the message names the setting."""
    if vllm_config.speculative_config is not None:
        raise ValueError("RAD cannot run with speculative decoding (speculative_config): it scores one token at a time")
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ValueError(f"RAD cannot run with pipeline parallelism (pipeline_parallel_size={stages}); use 1")
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        raise ValueError("RAD cannot run with enable_batch_sharded_sampling: every rank must see all rows of a batch")


def language_model_tokenizer(vllm_config: VllmConfig) -> Any:
    """The tokenizer of vLLM's model, or None for a folder that holds none."""
    config = vllm_config.model_config
    name = str(config.tokenizer or config.model)
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        return None
    return load_tokenizer(name, revision=config.tokenizer_revision, trust_remote_code=config.trust_remote_code)


def stop_ids(params: SamplingParams) -> list[int]:
    """Tokens that end a request, those that count for it first."""
    first = [] if params.eos_token_id is None else [params.eos_token_id]
    return [*first, *(params.stop_token_ids or ()), *sorted(params.all_stop_token_ids)]


def takes_the_best(params: SamplingParams) -> bool:
    """Whether nothing but the best token of every step matters: greedy, no penalties after RAD, no probabilities."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    return (
        params.temperature == 0
        and not any(penalties)
        and params.logprobs is None
        and not getattr(params, "logprob_token_ids", None)
    )
