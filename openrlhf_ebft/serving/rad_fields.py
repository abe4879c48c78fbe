"""The RAD part of a request: the nested `rad` object or flat `vllm_xargs`, checked before the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from openrlhf_ebft.config.serving import ServingConfig
from openrlhf_ebft.rad.engine.config import CONFIG_KEY, RADEngineConfig
from openrlhf_ebft.rad.engine.request import PREFIX, RADRequest, to_extra_args
from openrlhf_ebft.serving.errors import RequestError
from openrlhf_ebft.serving.request_body import Body


@dataclass(frozen=True)
class RADFields:
    """What a request says about RAD.

    Attributes:
        arguments: flat `rad_*` arguments for the engine.
        report_id: id under which the engine keeps the reason if it has to end the request.
        trace_id: id under which the engine keeps the scores; None when they were not asked for.
    """

    arguments: dict[str, Any]
    report_id: str
    trace_id: str | None


def engine_rad_config(config: ServingConfig) -> dict[str, Any]:
    """The entry `rad` of vLLM's `additional_config`."""
    return {
        "reward_models": {
            name: {
                "path": model.path,
                "score_index": model.score_index,
                "score_transform": model.score_transform,
                "dtype": config.model.dtype,
            }
            for name, model in config.reward_models.items()
        },
        "default": config.default_reward_model,
        "cache_tokens": config.rad.cache_tokens,
        "when_full": config.rad.when_full,
        "max_top_k": config.limits.top_k,
        "verify": config.rad.verify,
    }


class RADFieldReader:
    """Takes the RAD fields out of bodies.

    Args:
        config: reward models and limits.
    """

    def __init__(self, config: ServingConfig) -> None:
        self._engine = RADEngineConfig.from_additional_config({CONFIG_KEY: engine_rad_config(config)})

    def take(self, body: Body) -> RADFields | None:
        """Removes `rad`, `rad_trace` and `vllm_xargs` from `body`; None when it asks for no RAD.

        Raises:
            RequestError: both spellings at once, arguments that are no RAD arguments, or wrong values.
        """
        nested, flat = body.pop("rad", None), body.pop("vllm_xargs", None)
        wants_trace = body.pop("rad_trace", None)
        if wants_trace is not None and not isinstance(wants_trace, bool):
            raise RequestError("rad_trace must be true or false", param="rad_trace")
        if nested is not None and flat is not None:
            raise RequestError("give either rad or vllm_xargs, not both", param="vllm_xargs")
        if nested is None and flat is None:
            if wants_trace:
                raise RequestError("rad_trace needs rad: without it there are no scores", param="rad_trace")
            return None
        name = "rad" if nested is not None else "vllm_xargs"
        try:
            arguments = to_extra_args(nested) if nested is not None else _flat_arguments(flat)
            request = RADRequest.from_extra_args(arguments)
            if request is None:
                raise ValueError("vllm_xargs is empty; give at least rad_beta or rad_weights")
            self._engine.check_request(request)
        except ValueError as error:
            raise RequestError(str(error), param=name) from None
        # Ids are the server's own: a client must not read what belongs to another one's request.
        report_id = uuid4().hex
        arguments[f"{PREFIX}report"] = report_id
        arguments.pop(f"{PREFIX}trace", None)
        if not wants_trace:
            return RADFields(arguments, report_id, None)
        arguments[f"{PREFIX}trace"] = report_id
        return RADFields(arguments, report_id, report_id)


def _flat_arguments(flat: Any) -> dict[str, Any]:
    if not isinstance(flat, dict):
        raise ValueError("vllm_xargs must be an object with arguments such as rad_beta")
    foreign = sorted(name for name in flat if not name.startswith(PREFIX))
    if foreign:
        raise ValueError(f"vllm_xargs: {foreign[0]!r} is no RAD argument")
    return dict(flat)
