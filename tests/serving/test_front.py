"""Before Ray Serve's proxy: which headers pass, and Serve's own errors as error objects."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse

from openrlhf_ebft.serving import front
from openrlhf_ebft.serving.front import Front


def ask(app, path="/v1/models", **arguments) -> httpx.Response:
    async def once():
        transport = httpx.ASGITransport(Front(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path, **arguments)

    return asyncio.run(once())


async def show_headers(scope, receive, send):
    await JSONResponse(dict(Request(scope).headers))(scope, receive, send)


def test_only_headers_that_the_server_reads_pass():
    sent = {
        "Authorization": "Bearer k",
        "Content-Type": "application/json",
        "serve_multiplexed_model_id": "x",
        "Serve-Multiplexed-Model-Id": "x",
        "X-Request-Timeout-Seconds": "1",
        "X-Request-Disconnect-Disabled": "?1",
        "X-Session-Id": "s",
        "X-Request-Id": "r",
    }
    assert set(ask(show_headers, headers=sent).json()) <= {"authorization", "content-type", "host", "accept"}


@pytest.mark.parametrize(
    ("status", "text", "answered", "word"),
    [
        (404, "Path '/v1/models' not found.", 503, "starting or stopping"),
        (503, "Request dropped due to backpressure (queued: 5)", 503, "too many requests"),
        (503, "Deployment unavailable", 503, "starting or stopping"),
        (408, "Request timed out", 408, "timed out"),
        (500, "Traceback: /secret/path", 500, "its log tells more"),
    ],
)
def test_errors_of_serve_become_error_objects(status, text, answered, word):
    response = ask(PlainTextResponse(text, status_code=status))
    assert response.status_code == answered == response.json()["error"]["code"]
    assert word in response.json()["error"]["message"]
    assert "/secret" not in response.text
    assert ("retry-after" in response.headers) == (answered == 503)


@pytest.mark.parametrize("status", [200, 404, 503])
def test_answers_of_the_server_pass_unchanged(status):
    response = ask(JSONResponse({"error": {"message": "its own"}}, status_code=status))
    assert (response.status_code, response.json()) == (status, {"error": {"message": "its own"}})
    assert ask(PlainTextResponse("metrics")).text == "metrics"


def test_a_replica_that_dies_before_it_answers_is_500():
    async def die(scope, receive, send):
        return

    response = ask(die)
    assert response.status_code == 500 == response.json()["error"]["code"]


def test_health_does_not_wait_for_a_replica_that_loads(monkeypatch):
    monkeypatch.setattr(front, "_HEALTH_S", 0.05)

    async def wait_for_ever(scope, receive, send):
        await asyncio.Event().wait()

    response = ask(wait_for_ever, "/health")
    assert response.status_code == 503 == response.json()["error"]["code"]


def test_paths_of_serve_are_closed_but_for_its_health():
    assert ask(PlainTextResponse("routes"), "/-/routes").status_code == 404
    assert ask(PlainTextResponse("ok"), "/-/healthz").text == "ok"


@pytest.fixture
def listening(monkeypatch):
    """The port of uvicorn as Ray Serve's proxy starts it; its application answers in two pieces."""
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    assert len(front.middlewares()) == 1
    go_on = threading.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await asyncio.to_thread(go_on.wait, 20)
        await send({"type": "http.response.body", "body": b"half"})

    server = uvicorn.Server(uvicorn.Config(lambda: app, factory=True, lifespan="off", log_level=None, log_config=None))
    server.install_signal_handlers = lambda: None
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    yield listener.getsockname()[1]
    go_on.set()
    server.should_exit = True
    thread.join(20)


@pytest.mark.parametrize(
    "request_",
    [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nBad Header: 1\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"],
)
def test_what_is_not_http_gets_an_error_object(listening, request_):
    with socket.create_connection(("127.0.0.1", listening), timeout=20) as connection:
        connection.sendall(request_)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
        assert connection.recv(1) == b"", "the connection stays open"
    assert (answer.status, error["code"], error["type"]) == (400, 400, "invalid_request_error")


def test_an_answer_under_way_is_not_mixed_with_an_error(listening):
    with socket.create_connection(("127.0.0.1", listening), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while b"half" not in received:
            received += connection.recv(4096)
        connection.sendall(b"nonsense\r\n\r\n")
        while piece := connection.recv(4096):
            received += piece
    assert received.count(b"HTTP/1.1") == 1
