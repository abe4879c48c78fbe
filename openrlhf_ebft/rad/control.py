"""The RAD control: reward-augmented decoding for transformers' `generate()`."""

from __future__ import annotations

import copy
import gc
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from openrlhf_ebft.core.cpu_frozen import pack_frozen_model
from openrlhf_ebft.rad.args import RADArgs
from openrlhf_ebft.rad.loading import has_tokenizer, load_sequence_classifier
from openrlhf_ebft.rad.logprobs import continuation_logprobs
from openrlhf_ebft.rad.processor import ValueGuidedProcessor
from openrlhf_ebft.rad.prompt_mask import PromptMask
from openrlhf_ebft.rad.protocol import Capability, ModelAccess, Requirements
from openrlhf_ebft.rad.scoring_path import resolve_value
from openrlhf_ebft.rad.values import BaseCandidateValue, CandidateValue

REGISTRY_KEY = "output_control/rad"


class RAD:
    """Reward-Augmented Decoding (Deng and Raffel 2023, arXiv 2310.09520).

    At every step the `top_k` best tokens of the scores that arrive are candidates; each is scored by the reward model
    as the next token of the text so far, the reward is clamped to [0, 1] (then turned into 1 - reward by `invert`),
    and `beta` times it is added to the candidate's logit; all other tokens get -inf. The clamp is absolute, so equal
    rewards leave the distribution over the candidates unchanged, and `beta=0` is top-k sampling. With
    `score_transform="none"` and `invert`, any raw score >= 1 gives reward 0. Temperature and top-p of `generate()`
    are applied after the processor, so a temperature divides beta too.

    Use: `rad.steer(model, tokenizer)` once, then for every call
    `model.generate(..., logits_processor=rad.get_logits_processors(input_ids, {}, attention_mask=mask))`.

    Args: see :class:`RADArgs`.

    Attributes:
        scoring_path: None before `steer`, then "cached", "stateless" or "text".
        supports_batching: whether several rows may be steered in one call (that of the value).
    """

    Args = RADArgs
    __signature__ = inspect.signature(RADArgs)  # what help() shows
    RUNTIME_KWARGS_SCHEMA: list[dict[str, str]] = [  # noqa: RUF012 - part of the control protocol, never changed
        {
            "name": "value_trace",
            "type": "list",
            "scope": "call",
            "help": "A list of the caller's; receives one ValueStepRecord per step of this call.",
        }
    ]
    enabled: bool = True
    same_model_forwards: bool = False
    # The fields of RADArgs, which a clone may change for its own call.
    beta: float
    top_k: int
    invert: bool
    include_in_scoring: bool
    best_only: bool
    reward_model_kwargs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = RADArgs(*args, **kwargs)
        for item in fields(self.args):
            setattr(self, item.name, getattr(self.args, item.name))
        self.supports_batching = True
        self.scoring_path: str | None = None
        self.tokenizer: Any = None
        self._value: CandidateValue | None = None

    def steer(self, model: Any, tokenizer: Any = None, **_: Any) -> None:
        """Load the reward model on the model's device and choose the scoring path.

        Args:
            model: the language model.
            tokenizer: its tokenizer; without it, `model.tokenizer` or the one saved beside the model. When neither
                model has any, token ids are taken as shared.

        Raises:
            ValueError: only one of the two tokenizers can be found, or `score_index` is outside the model's outputs.

        Warns:
            UserWarning: one, when `efficient` is set and the cached path is impossible; it names the reason.
        """
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model)
        reward_model, rm_tokenizer = load_sequence_classifier(
            self.args.reward_model_id,
            device=next(model.parameters()).device,
            hf_model_kwargs=self.args.reward_model_kwargs,
        )
        pack_frozen_model(reward_model)
        value, self.scoring_path = resolve_value(
            reward_model,
            rm_tokenizer,
            self.tokenizer,
            score_index=self.args.score_index,
            score_transform=self.args.score_transform,
            efficient=self.args.efficient,
            verify=self.args.verify,
        )
        self._value = value
        self.supports_batching = value.supports_batching

    def get_logits_processors(
        self,
        input_ids: torch.Tensor,
        runtime_kwargs: dict[str, Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> list[ValueGuidedProcessor]:
        """A fresh processor for one generate call.

        Args:
            input_ids: [B, P] int64, the prompts.
            runtime_kwargs: may hold `value_trace`, a list that receives one record per step.
            attention_mask: [B, P], 1 at real tokens.

        Raises:
            RuntimeError: before `steer()` or after `cleanup()`.
            ValueError: a mask of another shape than the prompts, or a `value_trace` that is no list.
        """
        if self._value is None:
            raise RuntimeError("RAD has no reward model yet: call RAD.steer(model, tokenizer) before generating")
        trace = (runtime_kwargs or {}).get("value_trace")
        if trace is not None and not isinstance(trace, list):
            raise ValueError(f"runtime_kwargs['value_trace'] must be a list to append to, got {type(trace).__name__}")
        return [
            ValueGuidedProcessor(
                self._value,
                policy="top_k",
                k=self.top_k,
                beta=self.beta,
                normalize="clamp",
                invert=self.invert,
                mask_non_candidates=True,
                lm_tokenizer=self.tokenizer,
                prompt_ids=input_ids,
                attention_mask=attention_mask,
                trace=trace,
                best_only=self.best_only,
            )
        ]

    def get_stopping_criteria(self, input_ids: torch.Tensor, runtime_kwargs: Any = None, **_: Any) -> list[Any]:
        """No criteria: RAD never ends a text itself."""
        return []

    def compute_logprobs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        continuation_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        runtime_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Log-probabilities [B, C] of a continuation under RAD (without it when `include_in_scoring` is False).

        Args and errors: see :func:`continuation_logprobs`; RuntimeError before `steer()`. Without a mask, leading pad
        tokens are padding if the pad token is not also an end token, as in `generate()`.
        """
        if attention_mask is None and input_ids.dim() == 2:
            attention_mask = PromptMask.for_tokenizer(self.tokenizer).for_prefix(input_ids)
        processor = None
        if self.include_in_scoring:
            every = copy.copy(self)
            every.best_only = False  # a text's probability takes all candidates
            processor = every.get_logits_processors(input_ids, runtime_kwargs, attention_mask=attention_mask)[0]
        return continuation_logprobs(
            model, input_ids, continuation_ids, processor=processor, attention_mask=attention_mask
        )

    def clone_for_call(self, seed: int | None = None) -> RAD:
        """A cheap copy for one call: shares the reward model; has its own settings and memory. RAD draws no numbers,
        so the seed changes nothing."""
        clone = copy.copy(self)
        if isinstance(self._value, BaseCandidateValue):
            clone._value = self._value.for_call()
        return clone

    def cleanup(self) -> None:
        """Free the reward model; `steer()` loads it again."""
        if isinstance(self._value, BaseCandidateValue):
            self._value.cleanup()
        self._value = None
        self.tokenizer = None
        self.scoring_path = None
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    # The control protocol: nothing is fitted, and the reward model runs beside the language model.

    def steer_access(self) -> ModelAccess:
        """The live module: the reward model goes to its device."""
        return ModelAccess.MODULE

    def requirements(self) -> Requirements:
        """In-process torch while generating, and while scoring if RAD takes part in it."""
        needed = (Capability.IN_PROCESS_TORCH,)
        return Requirements(generate=needed, score=needed if self.include_in_scoring else ())

    def steer_fits(self) -> tuple[tuple[str, str], ...]:
        """Nothing is fitted."""
        return ()

    def export_state(self) -> dict[str, Any]:
        """No state: the reward model is named by its id."""
        return {}

    def fit_identity(self) -> None:
        """None: there is no fit to identify."""

    def frozen_form(self, state: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The control itself: its registry key and constructor arguments.

        Raises:
            ValueError: a state that is not empty cannot come from this control.
        """
        if state:
            raise ValueError(f"RAD exports no state, got keys {sorted(state)}")
        return REGISTRY_KEY, {item.name: copy.copy(getattr(self, item.name)) for item in fields(self.args)}

    def export_constraint(self, runtime_kwargs: dict[str, Any] | None = None) -> None:
        """None: RAD is no declarative constraint."""

    def export_generation_params(self, runtime_kwargs: dict[str, Any] | None = None) -> None:
        """None: RAD cannot be expressed as sampling parameters."""

    def export_processor_spec(self, runtime_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Plain data from which an engine can host RAD itself: `{"kind": "rad", "args": constructor arguments}`.

        Values that are not JSON are turned into their names (`torch.bfloat16` becomes "bfloat16").

        Raises:
            ValueError: an entry of `reward_model_kwargs` that has no plain form.
        """
        _, arguments = self.frozen_form({})
        arguments["reward_model_kwargs"] = {
            name: _plain(name, value) for name, value in self.reward_model_kwargs.items()
        }
        return {"kind": "rad", "args": arguments}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    raise ValueError(f"reward_model_kwargs[{name!r}] is a {type(value).__name__}, which has no plain form")


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer attached to the model or saved where it was loaded from; None when there is none."""
    attached = getattr(model, "tokenizer", None)
    if attached is not None:
        return attached
    origin = model.config.name_or_path
    if not origin or (Path(origin).is_dir() and not has_tokenizer(Path(origin))):
        return None
    return AutoTokenizer.from_pretrained(origin)
