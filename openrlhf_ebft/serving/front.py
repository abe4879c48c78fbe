"""What stands before Ray Serve's own HTTP proxy: header hygiene, and Serve's own errors as OpenAI-style objects.

Ray Serve's proxy obeys headers of its own (time limits, routing, ignoring a client that has left). Any client could
send them, so they end here. Serve loads this module in its proxy by the environment variable that `SETTING` names.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrlhf_ebft.serving import http_protocol
from openrlhf_ebft.serving.errors import error_body

SETTING = ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", f"{__name__}.middlewares")
_PASSED = (b"authorization", b"content-length", b"content-type", b"content-encoding", b"accept", b"origin", b"host")
_PASSED_CORS = (b"access-control-request-method", b"access-control-request-headers")
_HEALTH_S = 2.0  # limit for a replica to answer /health
_SERVE_PATHS = "/-/"
_STOPPING = "the server is starting or stopping; try again"
_FULL = "too many requests are waiting; try again"
_FAILED = "the server failed to answer; its log tells more"


def middlewares() -> list[Middleware]:
    """What Ray Serve's proxy puts around itself; it calls this before it begins to listen."""
    http_protocol.use_in_this_process()
    return [Middleware(Front)]


class Front:
    """ASGI middleware of the proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an HTTP request on with only the headers that the server reads."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(_SERVE_PATHS) and scope["path"] != "/-/healthz":
            await _refuse(send, f"no such path: {scope['path']}", HTTPStatus.NOT_FOUND)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() in _PASSED + _PASSED_CORS]
        clean = {**scope, "headers": headers}
        translated = _Translated(send)
        limit = _HEALTH_S if scope["path"] == "/health" else None
        try:
            async with asyncio.timeout(limit):
                await self._app(clean, receive, translated)
        except TimeoutError:
            if not translated.started:
                await _refuse(send, _STOPPING, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        if not translated.started:  # a replica died before it answered: Serve sends nothing
            await _refuse(send, _FAILED, HTTPStatus.INTERNAL_SERVER_ERROR)


class _Translated:
    """Turns an error that Serve itself answers in plain text into an error object."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 0
        self._held: bytearray | None = None  # text of an error of Serve's, until it is complete
        self.started = False

    async def __call__(self, message: Message) -> None:
        """Passes a message on, or holds it until the error's text is complete."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if message["status"] >= HTTPStatus.BAD_REQUEST and not _is_json(message):
                self._held = bytearray()
                return
        elif self._held is not None:
            self._held += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._held.decode("utf-8", "replace"))
            return
        self.started = True
        await self._send(message)

    async def _finish(self, text: str) -> None:
        self.started = True
        self._held = None
        # A path is unknown to Serve only while the application is not there; the application answers its own 404.
        if self._status in (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE):
            message = _FULL if "backpressure" in text else _STOPPING
            await _refuse(self._send, message, HTTPStatus.SERVICE_UNAVAILABLE)
        elif self._status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            await _refuse(self._send, _FAILED, self._status)
        else:
            await _refuse(self._send, text, self._status)


def _is_json(start: Message) -> bool:
    kinds = [value for name, value in start.get("headers", ()) if bytes(name).lower() == b"content-type"]
    return any(bytes(kind).startswith(b"application/json") for kind in kinds)


async def _refuse(send: Send, message: str, status: int) -> None:
    body = error_body(message, status)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
