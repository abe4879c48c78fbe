"""The fields that a request may have, each checked by type and range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrlhf_ebft.config.serving import LimitsConfig
from openrlhf_ebft.serving.errors import RequestError, shortened
from openrlhf_ebft.serving.request_body import Body, kind_of

_INT64 = 2**63 - 1
_MOST_STRINGS = 16  # stop strings
_MOST_IDS = 64  # stop token ids
_MOST_BIASES = 300
_MOST_MESSAGES = 1000


@dataclass(frozen=True)
class Number:
    """A field that holds a finite number from `low` to `high`."""

    low: float
    high: float
    whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises RequestError for another type or a number outside the range."""
        kinds = int if self.whole else (int, float)
        kind = "a whole number" if self.whole else "a number"
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise RequestError(f"{name} must be {kind}, got {_shown(value)}", param=name)
        if not self.low <= value <= self.high:
            raise RequestError(f"{name} must be from {self.low:g} to {self.high:g}, got {_shown(value)}", param=name)


def body_limits(limits: LimitsConfig, is_chat: bool) -> dict[str, Number | type]:
    """The fields of a request beside `model`, prompt or messages, and RAD: what each may hold."""
    fields: dict[str, Number | type] = {
        "stream": bool,
        "n": Number(1, limits.n, whole=True),
        "max_tokens": Number(1, limits.max_tokens, whole=True),
        "min_tokens": Number(0, limits.max_tokens, whole=True),
        "temperature": Number(0, 2),
        "top_p": Number(1e-6, 1),
        "top_k": Number(-1, _INT64, whole=True),
        "min_p": Number(0, 1),
        "seed": Number(-_INT64 - 1, _INT64, whole=True),
        "presence_penalty": Number(-2, 2),
        "frequency_penalty": Number(-2, 2),
        "repetition_penalty": Number(0.01, 10),
        "ignore_eos": bool,
        "skip_special_tokens": bool,
        "include_stop_str_in_output": bool,
        "add_special_tokens": bool,
        "return_token_ids": bool,
        "user": str,
    }
    if is_chat:
        return fields | {
            "max_completion_tokens": Number(1, limits.max_tokens, whole=True),
            "logprobs": bool,
            "top_logprobs": Number(0, limits.logprobs, whole=True),
            "add_generation_prompt": bool,
            "continue_final_message": bool,
        }
    return fields | {"logprobs": Number(0, limits.logprobs, whole=True), "echo": bool}


def check_fields(body: Body, limits: LimitsConfig, is_chat: bool) -> None:
    """Checks every field of a request; null counts as absent, and unknown fields are refused.

    Raises:
        RequestError: names the field and what it may hold.
    """
    rules = body_limits(limits, is_chat)
    own = {"model", "messages" if is_chat else "prompt", "stop", "stop_token_ids", "logit_bias", "stream_options"}
    own |= {"response_format"} if is_chat else set()
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    for name, value in body.items():
        if name not in rules and name not in own:
            known = ", ".join(sorted([*rules, *own, "rad", "rad_trace"]))
            raise RequestError(f"{shortened(name)!r} is not a field of this server; known: {known}", param=None)
        if name in rules:
            _check_field(name, value, rules[name])
    _check_stop(body)
    _check_biases(body.get("logit_bias", {}))
    if is_chat:
        _check_messages(body)
    else:
        _check_prompts(body, limits)
    if "stream_options" in body:
        _check_stream_options(body)
    if body.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise RequestError("response_format: this server writes plain text only", param="response_format")


def _check_field(name: str, value: Any, rule: Number | type) -> None:
    if isinstance(rule, Number):
        rule.check(name, value)
    elif not isinstance(value, rule):
        wanted = {bool: "true or false", str: "a string"}[rule]
        raise RequestError(f"{name} must be {wanted}, got {_shown(value)}", param=name)


def _check_stop(body: Body) -> None:
    stop = body.get("stop", [])
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise RequestError(f"stop must be a string or a list of strings, none empty, got {_shown(stop)}", param="stop")
    if len(strings) > _MOST_STRINGS:
        raise RequestError(f"stop takes at most {_MOST_STRINGS} strings, got {len(strings)}", param="stop")
    ids = body.get("stop_token_ids", [])
    if not isinstance(ids, list) or len(ids) > _MOST_IDS:
        raise RequestError(
            f"stop_token_ids must be a list of at most {_MOST_IDS} token ids, got {_shown(ids)}", param="stop_token_ids"
        )
    for value in ids:
        Number(0, 2**31 - 1, whole=True).check("stop_token_ids", value)


def _check_biases(biases: Any) -> None:
    if not isinstance(biases, dict) or len(biases) > _MOST_BIASES:
        raise RequestError(
            f"logit_bias must be an object of at most {_MOST_BIASES} token ids, got {_shown(biases)}",
            param="logit_bias",
        )
    for token, value in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RequestError(f"logit_bias: {shortened(token)!r} is no token id", param="logit_bias")
        Number(-100, 100).check("logit_bias", value)


def _check_messages(body: Body) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= _MOST_MESSAGES:
        raise RequestError(
            f"messages must be a list of 1 to {_MOST_MESSAGES} messages, got {_shown(messages)}", param="messages"
        )
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or set(message) - {"role", "content", "name"}:
            raise RequestError(f"{where} must be an object with role and content", param="messages")
        if message.get("role") not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{where}.role must be system, developer, user or assistant", param="messages")
        if not isinstance(message.get("content"), str) and not _is_text_parts(message.get("content")):
            raise RequestError(f"{where}.content must be text", param="messages")
        if not isinstance(message.get("name", ""), str):
            raise RequestError(f"{where}.name must be text", param="messages")


def _is_text_parts(content: Any) -> bool:
    return (
        isinstance(content, list)
        and len(content) > 0
        and all(
            isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text"
            and isinstance(part["text"], str)
            for part in content
        )
    )  # fmt: skip


def _check_prompts(body: Body, limits: LimitsConfig) -> None:
    prompt = body.get("prompt")
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], (str, list)):
        prompts = prompt
    if len(prompts) > limits.prompts:
        raise RequestError(f"prompt: at most {limits.prompts} prompts, got {len(prompts)}", param="prompt")
    for one in prompts:
        if isinstance(one, list):
            if not one:
                raise RequestError("prompt: a list of token ids must not be empty", param="prompt")
            for token in one:
                Number(0, 2**31 - 1, whole=True).check("prompt", token)
        elif not isinstance(one, str) or not one:
            raise RequestError(f"prompt must be text or token ids, not empty, got {_shown(one)}", param="prompt")


def _check_stream_options(body: Body) -> None:
    options = body["stream_options"]
    flags = isinstance(options, dict) and all(isinstance(value, bool) for value in options.values())
    if not flags or set(options) - {"include_usage", "continuous_usage_stats"}:
        raise RequestError("stream_options must be an object such as {include_usage: true}", param="stream_options")
    if not body.get("stream"):
        raise RequestError("stream_options needs stream: true", param="stream_options")


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (list, dict)):
        return f"{kind_of(value)} of {len(value)}"
    return "nothing" if value is None else shortened(repr(value))[:80]
