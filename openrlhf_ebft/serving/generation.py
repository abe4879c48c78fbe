"""One completion or chat request: from a checked body through vLLM's handlers to a response."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from pydantic import PrivateAttr, ValidationError
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError
from vllm.renderers import TokenizeParams

from openrlhf_ebft.config.serving import ServingConfig
from openrlhf_ebft.serving.errors import RequestError, error_object
from openrlhf_ebft.serving.rad_fields import RADFieldReader, RADFields
from openrlhf_ebft.serving.request_body import Body
from openrlhf_ebft.serving.request_fields import check_fields
from openrlhf_ebft.serving.traces import TraceReader

_LENGTH_PARAMS = ("input_tokens", "input_text")  # what vLLM calls a prompt that is too long
_DONE = "data: [DONE]\n\n"
_EVENT = "data: "
_CHUNK_HEAD = ("id", "object", "created", "model")
log = logging.getLogger(__name__)


class _LimitedPrompt:
    """Mixin of vLLM's request classes: a limit on the prompt alone, checked where vLLM counts its tokens."""

    _prompt_limit: int | None

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """vLLM's rules for tokenizing the prompt, with the smaller of the model's limit and this server's."""
        params: TokenizeParams = super().build_tok_params(model_config)  # type: ignore[misc]
        limit = self._prompt_limit
        if limit is None or (params.max_total_tokens or limit) <= limit:
            return params
        # vLLM lets a prompt fill all that it may hold; how much is left for the answer it checks elsewhere.
        return dataclasses.replace(
            params, max_total_tokens=limit, max_output_tokens=min(params.max_output_tokens or 0, limit)
        )


class LimitedCompletionRequest(_LimitedPrompt, CompletionRequest):
    """A completion request with a prompt limit."""

    _prompt_limit: int | None = PrivateAttr(None)


class LimitedChatRequest(_LimitedPrompt, ChatCompletionRequest):
    """A chat request with a prompt limit."""

    _prompt_limit: int | None = PrivateAttr(None)


class Generation:
    """Answers completion and chat requests with vLLM's handlers.

    Args:
        config: limits, names and reward models.
        handlers: the state that `start_engine` returned.
        traces: fetches the scores of a request from the engine.
    """

    def __init__(self, config: ServingConfig, handlers: State, traces: TraceReader) -> None:
        self._config = config
        self._handlers = handlers
        self._traces = traces
        self._rad = RADFieldReader(config)
        self._forgetting: set[asyncio.Task[Any]] = set()

    async def answer(self, body: Body, *, is_chat: bool) -> Response:
        """The response to a request.

        Raises:
            RequestError: the request cannot be served; nothing has been sent yet.
        """
        rad = self._rad.take(body)
        check_fields(body, self._config.limits, is_chat)
        if is_chat and "max_tokens" not in body and "max_completion_tokens" not in body:
            body["max_completion_tokens"] = self._config.limits.max_tokens
        body["request_id"] = uuid4().hex
        if rad is not None:
            body["vllm_xargs"] = rad.arguments
            if rad.trace_id is not None:
                body["return_token_ids"] = True  # scores are put beside the tokens
        try:
            result = await self._start(body, is_chat)
        except asyncio.CancelledError:
            if rad is not None:
                self._forget(rad)
            raise
        except RequestError:
            raise
        except (VLLMError, ValueError, OverflowError, NotImplementedError) as error:
            raise self._refusal(create_error_response(error)) from error
        if isinstance(result, ErrorResponse):
            raise self._refusal(result)
        if not isinstance(result, AsyncIterator):
            if rad is not None and (reason := await self._traces.error(rad.report_id)) is not None:
                raise RequestError(f"rad: {reason}", param="rad", status=_reason_status(reason))
            content = result.model_dump()
            if rad is not None and rad.trace_id is not None:
                ids = [choice["token_ids"] or [] for choice in content["choices"]]
                content["rad_trace"] = await self._traces.take(rad.trace_id, ids)
            return JSONResponse(content)
        return await self._stream(result, rad)

    async def _start(self, body: Body, is_chat: bool) -> Any:
        kind = LimitedChatRequest if is_chat else LimitedCompletionRequest
        handlers = self._handlers
        try:
            request = kind.model_validate(body)
        except ValidationError as error:
            detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = ".".join(str(part) for part in detail["loc"][:1])
            raise RequestError(f"{name or 'request'}: {detail['msg']}", param=name or None) from None
        request._prompt_limit = self._config.limits.prompt_tokens
        # vLLM reads ranks, priorities and session ids from headers of the raw request: it gets none.
        if isinstance(request, ChatCompletionRequest):
            return await handlers.openai_serving_chat.create_chat_completion(request, None)
        return await handlers.openai_serving_completion.create_completion(request, None)

    def _refusal(self, response: ErrorResponse) -> RequestError:
        error, limit = response.error, self._config.limits.prompt_tokens
        if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("request failed: %s", error.message)
        if error.param in _LENGTH_PARAMS and limit is not None:
            return RequestError(f"the prompt is longer than {limit} tokens", param="prompt")
        return RequestError(error.message, param=error.param, status=error.code)

    async def _stream(self, events: AsyncIterator[str], rad: RADFields | None) -> Response:
        """A stream of events; an error before the first token becomes a plain refusal."""
        first = await anext(events)
        if error := _error_event(first):
            raise RequestError(error["message"], param=error.get("param"), status=_client_status(error))
        content = self._events(first, events, rad) if rad is not None else _chain(first, events)
        return StreamingResponse(content, media_type="text/event-stream")

    async def _events(self, first: str, rest: AsyncIterator[str], rad: RADFields) -> AsyncIterator[str]:
        """vLLM's events; before the end one more with the scores of all tokens, or with the reason of a failure."""
        try:
            async for event in self._with_ending(first, rest, rad):
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # the client has left: nobody fetches the scores
            self._forget(rad)
            raise

    async def _with_ending(self, first: str, rest: AsyncIterator[str], rad: RADFields) -> AsyncIterator[str]:
        tokens: dict[int, list[int]] = {}
        head: dict[str, Any] = {}
        async for event in _chain(first, rest):
            if event == _DONE:
                if (reason := await self._traces.error(rad.report_id)) is not None:
                    yield f"{_EVENT}{json.dumps(error_object(f'rad: {reason}', _reason_status(reason), 'rad'))}\n\n"
                elif rad.trace_id is not None:
                    scores = await self._traces.take(rad.trace_id, [tokens[index] for index in sorted(tokens)])
                    yield f"{_EVENT}{json.dumps(head | {'choices': [], 'rad_trace': scores})}\n\n"
            elif rad.trace_id is not None and event.startswith(_EVENT):
                chunk = json.loads(event.removeprefix(_EVENT))
                head = head or {name: chunk.get(name) for name in _CHUNK_HEAD}
                for choice in chunk.get("choices", ()):
                    tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            yield event

    def _forget(self, rad: RADFields) -> None:
        if rad.trace_id is not None:
            task = asyncio.create_task(self._traces.take(rad.trace_id, []))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


def _reason_status(reason: str) -> int:
    """A full cache passes; anything else is the request's."""
    return int(HTTPStatus.SERVICE_UNAVAILABLE if reason.startswith("no room") else HTTPStatus.BAD_REQUEST)


def _error_event(event: str) -> dict[str, Any] | None:
    if not event.startswith('data: {"error"'):
        return None
    error = json.loads(event.removeprefix(_EVENT))["error"]
    return error if isinstance(error, dict) else None


def _client_status(error: dict[str, Any]) -> int:
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else int(HTTPStatus.INTERNAL_SERVER_ERROR)
