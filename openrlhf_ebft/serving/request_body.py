"""A request's body: read with a limit and decoded strictly."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from openrlhf_ebft.serving.errors import RequestError, shortened

Body = dict[str, Any]
_DEEPEST = 32  # nested lists and objects
_BODY_S = 30.0  # limit for a body to arrive, in seconds


async def read_body(request: Request, most_bytes: int) -> Body:
    """The JSON object of a request.

    Raises:
        RequestError: 413 for a body above `most_bytes`, 408 for one that does not arrive, 415 for another media type
            or encoding, 400 for anything that is not one JSON object in UTF-8 with finite numbers and whole
            characters.
    """
    _require_json(request)
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > most_bytes:
        raise _too_large(most_bytes)
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most_bytes:
                    raise _too_large(most_bytes)
    except ClientDisconnect:
        raise RequestError("the connection closed before the body was complete") from None
    except TimeoutError:
        message = f"the body did not arrive within {_BODY_S:g} s"
        raise RequestError(message, status=HTTPStatus.REQUEST_TIMEOUT) from None
    return parse_object(bytes(data))


def parse_object(data: bytes) -> Body:
    """Decodes one JSON object; errors as `read_body`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: byte {data[error.start]:#04x} at {error.start}") from None
    try:
        body = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise RequestError(f"the body is nested deeper than {_DEEPEST} levels") from None
    except RequestError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise RequestError(f"the body holds a number that is too long: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {kind_of(body)}")
    _check_values(body, "")
    return body


def _require_json(request: Request) -> None:
    types = request.headers.getlist("content-type")
    media, _, parameters = types[0].partition(";") if len(types) == 1 else ("", "", "")
    charset = parameters.strip().lower().replace('"', "")
    if media.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise RequestError("Content-Type must be application/json (UTF-8)", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(
            "Content-Encoding is not supported: send the body as it is", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        )


def _unique(pairs: list[tuple[str, Any]]) -> Body:
    body = dict(pairs)
    if len(body) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(f"the key {shortened(twice)!r} stands twice in one object")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body holds {name}: numbers must be finite")


def _check_values(value: Any, path: str, depth: int = 0) -> None:
    """Refuses what JSON can spell but nothing here can use: 1e999, half a surrogate pair, deep nesting."""
    if depth > _DEEPEST:
        raise RequestError(f"the body is nested deeper than {_DEEPEST} levels")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise RequestError(f"{path or 'the body'} holds half of a surrogate pair, which is no character")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RequestError(f"{path}: the number is too large")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_values(key, path, depth + 1)
            _check_values(item, f"{path}.{shortened(key)}" if path else shortened(key), depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_values(item, path, depth + 1)


def _too_large(most_bytes: int) -> RequestError:
    return RequestError(f"the body is larger than {most_bytes} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def kind_of(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
