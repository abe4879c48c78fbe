"""The HTTP application of one replica: routes, keys, limits, draining."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from openrlhf_ebft.config.serving import ServingConfig
from openrlhf_ebft.serving.api_keys import require_key
from openrlhf_ebft.serving.errors import RequestError, error_object
from openrlhf_ebft.serving.request_body import Body, read_body

PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
log = logging.getLogger(__name__)


class Admission:
    """Counts running requests of the API and refuses new ones once the server is stopping."""

    def __init__(self) -> None:
        self.running = 0
        self.draining = False
        self.answers: dict[tuple[str, int], int] = {}  # (path, status) -> count

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The application with counting and refusing around it."""

        async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            if self.draining:
                refuse = refusal("the server is stopping", HTTPStatus.SERVICE_UNAVAILABLE)
                self._count(scope["path"], HTTPStatus.SERVICE_UNAVAILABLE)
                await refuse(scope, receive, send)
                return
            self.running += 1
            try:
                await app(scope, receive, self._counting(scope["path"], send))
            finally:
                self.running -= 1

        return admitted

    def _counting(self, path: str, send: Send) -> Send:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._count(path, message["status"])
            await send(message)

        return counted

    def _count(self, path: str, status: int) -> None:
        key = (path if path in API_PATHS else "other", int(status))
        self.answers[key] = self.answers.get(key, 0) + 1


API_PATHS = ("/v1/completions", "/v1/chat/completions")
Answer = Callable[[Body, bool], Awaitable[Response]]


def refusal(message: str, status: int, param: str | None = None) -> JSONResponse:
    """A refusal as a response."""
    headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "5"
    return JSONResponse(error_object(message, status, param), status_code=status, headers=headers)


def build_app(
    config: ServingConfig,
    key_digests: Sequence[bytes],
    *,
    answer: Answer,
    models: Callable[[], Awaitable[dict[str, Any]]],
    health: Callable[[], Awaitable[None]],
    metrics: Callable[[], Awaitable[str]],
) -> FastAPI:
    """Routes of the server and no others.

    Args:
        config: limits and web origins.
        key_digests: of the API keys; empty lets everybody in.
        answer: answers a completion (False) or chat (True) request.
        models: content of /v1/models.
        health: raises RequestError when the server cannot answer.
        metrics: text of /metrics in Prometheus' format.
    """
    # A redirect to a path without its last slash would go to whatever host the request claims to be for.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    async def generate(request: Request) -> Response:
        _authorize(request, key_digests)
        body = await read_body(request, config.limits.body_bytes)
        return await answer(body, request.url.path == API_PATHS[1])

    for path in API_PATHS:
        app.add_api_route(path, generate, methods=["POST"])

    @app.get("/v1/models")
    async def list_models(request: Request) -> JSONResponse:
        _authorize(request, key_digests)
        return JSONResponse(await models())

    @app.get("/health")
    async def show_health() -> JSONResponse:
        await health()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        _authorize(request, key_digests)
        return Response(await metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    async def show_page() -> HTMLResponse:
        headers = {"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    _handle_errors(app)
    if config.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.http.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


def _authorize(request: Request, key_digests: Sequence[bytes]) -> None:
    lines = [value for name, value in request.scope["headers"] if name.lower() == b"authorization"]
    require_key(lines, key_digests)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def show_refusal(request: Request, error: RequestError) -> JSONResponse:
        return refusal(str(error), error.status, error.param)

    @app.exception_handler(HTTPException)
    async def show_http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == HTTPStatus.NOT_FOUND:
            return refusal(f"no such path: {request.url.path}", error.status_code)
        return refusal(f"{request.method} {request.url.path}: {error.detail}", error.status_code)

    @app.exception_handler(Exception)
    async def show_fault(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", exc_info=error)
        return refusal("the server failed to answer; its log tells more", HTTPStatus.INTERNAL_SERVER_ERROR)
