"""Refusals as OpenAI-style error objects."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

_LONGEST_MESSAGE = 1000  # characters; a message may quote the request


class RequestError(ValueError):
    """A request that is refused: an HTTP status, a sentence and, where one is at fault, the parameter's name."""

    def __init__(self, message: str, *, param: str | None = None, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.param = param
        self.status = int(status)


def error_object(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The JSON body of a refusal."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        kind = "authentication_error"
    return {"error": {"message": shortened(message), "type": kind, "param": param, "code": status}}


def error_body(message: str, status: int, param: str | None = None) -> bytes:
    """`error_object` as JSON, ASCII only, so that any quoted text can be sent."""
    return json.dumps(error_object(message, status, param)).encode("ascii")


def shortened(message: str) -> str:
    """A message of bounded length."""
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 4] + " ..."
