"""What an engine is told about RAD at start: its reward models and the size of their prefix caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from openrlhf_ebft.config.section import Precision, Section
from openrlhf_ebft.rad.engine.request import RADRequest

CONFIG_KEY = "rad"


class RewardModelConfig(Section):
    """One reward model of an engine."""

    path: str = Field(min_length=1, description="folder or hub id of a decoder-only sequence classifier")
    dtype: Precision | None = Field(None, description="precision of its weights and cache; default: the engine's dtype")
    score_index: int = Field(0, ge=0, description="output column that is the reward")
    score_transform: Literal["none", "sigmoid", "softmax"] = Field(
        "none", description="applied over the outputs before the column is taken"
    )
    trust_remote_code: bool = Field(False, description="run Python code shipped inside the model's repository")


class RADEngineConfig(Section):
    """The `rad` entry of an engine's additional configuration."""

    reward_models: dict[str, RewardModelConfig] = Field(min_length=1, description="reward models by name")
    default: str | None = Field(None, description="the one that requests without a name use; default: the only one")
    cache_tokens: int = Field(
        32768, ge=1, description="prefix tokens whose keys and values are kept, for each reward model"
    )
    when_full: Literal["wait", "error"] = Field(
        "wait",
        description="a request that finds no room in the cache: wait = score it without the cache until there is room "
        "(slower, same scores); error = end that request",
    )
    max_top_k: int = Field(256, ge=1, description="largest number of candidates per step that a request may ask for")
    prefill_tokens: int = Field(1024, ge=1, description="new prefix tokens of one reward forward, at most")
    verify: bool = Field(False, description="compare every score with a full forward (slow, for debugging)")

    @model_validator(mode="after")
    def _default_is_known(self) -> Self:
        if self.default is not None and self.default not in self.reward_models:
            raise ValueError(f"default {self.default!r} is none of the reward models {', '.join(self.reward_models)}")
        return self

    @classmethod
    def from_additional_config(cls, additional_config: object) -> RADEngineConfig:
        """The checked `rad` entry of an engine's `additional_config`.

        Raises:
            ValueError: no such entry, or faults in it, each named by its key.
        """
        entry = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
        if entry is None:
            raise ValueError(
                'RAD needs its reward models: additional_config={"rad": {"reward_models": {"NAME": {"path": ...}}}}'
            )
        try:
            return cls.model_validate(entry)
        except ValidationError as fault:
            problems = "; ".join(_sentence(error) for error in fault.errors())
            raise ValueError(f"additional_config: {problems}") from fault

    def model_name(self, name: str | None) -> str:
        """The reward model that a request means by `name`, None being the default one.

        Raises:
            ValueError: unknown name, or no default.
        """
        if name is None:
            if self.default is None and len(self.reward_models) > 1:
                raise ValueError(
                    f"rad_reward_model is missing and the engine has no default; its reward models are {self._names()}"
                )
            return self.default or next(iter(self.reward_models))
        if name not in self.reward_models:
            raise ValueError(f"unknown reward model {name!r}; the engine's reward models are {self._names()}")
        return name

    def check_request(self, request: RADRequest) -> None:
        """Raise ValueError for a request that this engine cannot serve; the message names the argument."""
        if request.top_k > self.max_top_k:
            raise ValueError(f"rad_top_k is {request.top_k}, but this engine allows at most {self.max_top_k}")
        for term in request.terms():
            self.model_name(term.model)

    def _names(self) -> str:
        return ", ".join(sorted(self.reward_models))


def _sentence(error: Any) -> str:
    where = ".".join([CONFIG_KEY, *(str(part) for part in error["loc"])])
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"
