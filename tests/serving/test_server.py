"""The real server over HTTP. Tests run in this order on one server; the last ones take it apart."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import re
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest
import torch
from openai import AuthenticationError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ebft.rad import RAD
from openrlhf_ebft.trainer.manifests import Manifest, write_manifest
from openrlhf_ebft.trainer.state import TrainerState
from tests.serving.conftest import KEY, Server, stream_events
from tests.serving.malformed import malformed_requests
from tests.tiny_models import tiny_llama

PROMPTS = ("hello", "the cat", "he said: hello", "one two three", "what is this?", "a")
RADS = (
    None,
    {"beta": 3},
    {"beta": 40, "top_k": 5, "reward_model": "bad"},
    {"beta": 20, "invert": True},
    {"weights": {"good": 10, "bad": -20}},
)
pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def with_rad(rad):
    return {} if rad is None else {"rad": rad}


def test_the_openai_client_sees_model_completion_and_chat(client):
    listed = client.models.list()
    assert [model.id for model in listed.data] == ["tiny"]
    assert listed.model_extra["rad"] == {"reward_models": ["good", "bad"], "default": "good", "max_top_k": 40}
    whole = {"ignore_eos": True}
    done = client.completions.create(
        model="tiny", prompt="hello", max_tokens=7, temperature=0.5, seed=1, n=2, extra_body=whole
    )
    assert len(done.choices) == 2
    assert done.usage.completion_tokens == 14
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=7, temperature=0)
    assert chat.choices[0].message.role == "assistant"
    steered = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=7, temperature=0, extra_body={"rad": {"beta": 40}}
    )
    assert steered.choices[0].message.content != chat.choices[0].message.content


@pytest.mark.parametrize("rad", [rad for rad in RADS if rad and "weights" not in rad], ids=str)
def test_greedy_answers_equal_generate_with_the_library(server, rad):
    model = AutoModelForCausalLM.from_pretrained(server.folder / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(server.folder / "run" / "model")
    name = rad.get("reward_model", "good")
    arguments = {key: value for key, value in rad.items() if key != "reward_model"}
    control = RAD(reward_model_id=str(server.folder / name), score_transform="sigmoid", **arguments)
    control.steer(model, tokenizer)
    for prompt in PROMPTS[:3]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        processors = control.get_logits_processors(ids)
        with torch.no_grad():
            output = model.generate(ids, logits_processor=processors, do_sample=False, max_new_tokens=16)
        assert server.text(prompt=prompt, rad=rad) == tokenizer.decode(output[0, ids.size(1) :], True)


def test_flat_arguments_give_the_same_as_nested_ones(server):
    nested = server.text(prompt="hello", rad={"weights": {"good": 10, "bad": -20}})
    flat = server.text(prompt="hello", vllm_xargs={"rad_weights": ["good=10", "bad=-20"]})
    assert nested == flat != server.text(prompt="hello")


def stream(server: Server, body: dict, path: str = "/v1/completions") -> list[dict]:
    with httpx.stream("POST", server.url + path, json=body, headers=server.headers, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return stream_events(list(response.iter_lines()))


@pytest.mark.parametrize("rad", RADS, ids=str)
def test_a_stream_joined_is_the_whole_answer(server, rad):
    body = {"prompt": "the cat", "max_tokens": 16, "temperature": 0} | with_rad(rad)
    events = stream(server, body | {"stream": True, "stream_options": {"include_usage": True}})
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    whole = server.complete(**body)
    assert text == whole["choices"][0]["text"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_scores_of_the_response_are_those_of_the_reward_models(server, path, streamed):
    is_chat = "chat" in path
    body = {"max_tokens": 9, "temperature": 1, "seed": 5, "n": 2, "rad_trace": True}
    body |= {"rad": {"weights": {"good": 10, "bad": -5}, "top_k": 8}}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if is_chat else {"prompt": "hello"}
    if streamed:
        events = stream(server, body | {"stream": True}, path)
        (trace,) = [event["rad_trace"] for event in events if "rad_trace" in event]
    else:
        trace = server.post(body, path).json()["rad_trace"]
    tokenizer = AutoTokenizer.from_pretrained(server.folder / "run" / "model")
    prompt = "user: hello\nassistant: " if is_chat else "hello"
    ids = tokenizer(prompt).input_ids
    assert [choice["index"] for choice in trace] == [0, 1]
    for choice in trace:
        assert choice["error"] is None
        tokens = [token["id"] for token in choice["tokens"]]
        content = [token for token in tokens if token not in tokenizer.all_special_ids]
        assert "".join(token["text"] for token in choice["tokens"] if token["id"] in content) == tokenizer.decode(
            content
        )
        for name in ("good", "bad"):
            assert rewards_of(server.folder / name, ids, tokens) == pytest.approx(
                [token["rewards"][name] for token in choice["tokens"]], abs=1e-5
            )


def rewards_of(folder, prompt: list[int], response: list[int]) -> list[float]:
    """Rewards of all response tokens by one plain forward pass for each prefix."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rewards = []
    with torch.no_grad():
        for end in range(1, len(response) + 1):
            hidden = model.model(torch.tensor([prompt + response[:end]])).last_hidden_state[0, -1]
            rewards.append(float(model.score(hidden).sigmoid()))
    return rewards


def test_health_page_and_metrics(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ready"}
    page = httpx.get(f"{server.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=[\"']?https?:", page.text)
    before = server.metric("rad_steered_tokens_total"), server.metric("rad_server_requests_total", status="200")
    server.complete(prompt="hello", rad={"beta": 1}, max_tokens=6, ignore_eos=True)
    assert server.metric("rad_steered_tokens_total") == before[0] + 6
    assert server.metric("rad_server_requests_total", status="200") == before[1] + 1
    assert server.metric("rad_reward_forward_seconds_total", reward_model="good") > 0
    assert server.metric("rad_reward_cache_tokens", reward_model="bad") >= 32768
    server.wait_until(server.is_idle)


@pytest.mark.parametrize(
    "path",
    ["/docs", "/openapi.json", "/v1/embeddings", "/tokenize", "/invocations", "/v1/load_lora_adapter", "/-/routes",
     "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/server_info", "/collective_rpc", "/../keys",
     "/v1/completions/render", "/ping", "/version", "/load", "/page.html", "/v1/models/tiny", "//v1/models",
     "/v1/completions/", "/health/"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_else_is_exposed(server, path, method):
    response = httpx.request(method, server.url + path, headers=server.headers)
    assert response.status_code in (404, 405)
    assert_refusal(response)


def assert_refusal(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert error["message"]
    assert len(response.content) < 4000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"])
@pytest.mark.parametrize("key", [None, "", "Bearer wrong-key", f"Basic {KEY}", KEY, f"Bearer {KEY} {KEY}"])
def test_wrong_keys_are_401(server, path, key):
    method = "POST" if "completions" in path else "GET"
    headers = {} if key is None else {"Authorization": key}
    response = httpx.request(method, server.url + path, headers=headers, json={} if method == "POST" else None)
    assert response.status_code == 401
    assert_refusal(response)


def test_the_openai_client_raises_its_own_error_for_a_wrong_key(server):
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_other_origins_get_no_permission(server):
    for method in ("OPTIONS", "POST"):
        headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"} | server.headers
        response = httpx.request(method, f"{server.url}/v1/completions", headers=headers)
        assert not any(name.startswith("access-control") for name in response.headers)


def test_500_malformed_requests_are_refused_and_change_nothing(server):
    before = server.text(prompt="hello", rad={"beta": 20})
    started = server.metric("vllm:request_success_total"), server.metric("rad_requests_total")
    replica = replica_pids()
    with httpx.Client(timeout=60) as connection:
        for arguments in malformed_requests(500):
            headers = server.headers | arguments.pop("headers", {})
            response = connection.post(f"{server.url}/v1/completions", headers=headers, **arguments)
            assert 400 <= response.status_code < 500, (str(arguments)[:300], response.text)
            assert_refusal(response)
    assert (server.metric("vllm:request_success_total"), server.metric("rad_requests_total")) == started
    assert server.text(prompt="hello", rad={"beta": 20}) == before
    assert replica_pids() == replica
    server.wait_until(server.is_idle)


def test_a_request_that_the_engine_must_end_gets_the_reason(server):
    body = {"prompt": "hello", "max_tokens": 4, "rad": {"beta": 1, "score_index": 3}}
    response = server.post(body)
    assert_refusal(response)
    assert "score_index is 3" in response.json()["error"]["message"]
    events = stream(server, body | {"stream": True})
    assert "score_index is 3" in events[-1]["error"]["message"]
    assert server.text(prompt="hello", rad={"beta": 1})


def test_ten_megabytes_are_413_announced_or_not(server):
    def chunks():
        for _ in range(160):
            yield b" " * 65536

    headers = server.headers | {"content-type": "application/json"}
    for content in (b" " * 10_000_000, chunks()):
        response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)
        assert response.status_code == 413
        assert_refusal(response)


@pytest.mark.parametrize(
    "headers",
    [
        {"serve_multiplexed_model_id": "x"},
        {"serve-multiplexed-model-id": "\u00ff"},
        {"x-request-id": "\u00ff"},
        {"x-request-timeout-seconds": "0.000001"},
        {"x-request-disconnect-disabled": "?1"},
        {"x-data-parallel-rank": "99"},
        {"x-vllm-priority": "x"},
        {"x-session-id": "y" * 3000},
        {"traceparent": "nonsense"},
        {"x-forwarded-for": "1.2.3.4", "forwarded": "for=1.2.3.4"},
        {"host": "evil.example"},
    ],
    ids=str,
)
def test_headers_of_the_machinery_have_no_effect(server, headers):
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    sent |= {name: value.encode() for name, value in server.headers.items()}
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=sent, timeout=30)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == server.text(**body)


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 5", "Content-Length: 7"],
        ["Content-Length: -1"],
        ["Content-Length: x"],
        ["Bad Header: 1", "Content-Length: 0"],
        ["X: " + "y" * 100_000, "Content-Length: 0"],
    ],
    ids=lambda lines: lines[0][:20],
)
def test_broken_http_ends_at_the_door(server, lines):
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *lines])
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n{}")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert 400 <= answer.status == error["code"] < 500
    assert error["message"]


def test_64_streams_at_once_each_get_their_solo_answer(server):
    kinds = [(prompt, rad) for prompt, rad in itertools.product(PROMPTS, RADS)]
    solo = {}
    for prompt, rad in kinds:
        solo[prompt, str(rad)] = server.text(prompt=prompt, max_tokens=40, **with_rad(rad))
    plain = [kind for kind in kinds if kind[1] is None]
    steered = [kind for kind in kinds if kind[1] is not None]
    turns = zip(itertools.cycle(plain), itertools.cycle(steered), strict=False)
    jobs = list(itertools.chain.from_iterable(itertools.islice(turns, 32)))
    memory, failed = replica_memory(), server.metric("rad_failed_requests_total")
    answers = asyncio.run(all_streams(server, jobs))
    for number, ((prompt, rad), (text, is_whole)) in enumerate(zip(jobs, answers, strict=True)):
        expected = solo[prompt, str(rad)]
        assert text == expected if is_whole else expected.startswith(text), (number, prompt, rad)
    assert sum(not is_whole for _, is_whole in answers) >= 4
    server.wait_until(server.is_idle)
    assert server.metric("rad_failed_requests_total") == failed
    assert replica_memory() < memory + 200 * 2**20


async def all_streams(server: Server, jobs) -> list[tuple[str, bool]]:
    """(text, whether it was read to the end) of all jobs at once; every tenth leaves after its third piece."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits, headers=server.headers) as connection:

        async def one(number: int, prompt: str, rad) -> tuple[str, bool]:
            body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": True} | with_rad(rad)
            pieces: list[str] = []
            async with connection.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return "".join(pieces), True
                    if line.startswith("data: "):
                        pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                    if number % 10 == 9 and len(pieces) == 3:
                        return "".join(pieces), False
            raise AssertionError("the stream broke off")

        return await asyncio.gather(*(one(number, *job) for number, job in enumerate(jobs)))


LONG = {"prompt": "hello", "max_tokens": 90, "temperature": 0, "ignore_eos": True, "rad": {"beta": 5}}


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_ends_its_request(server, streamed):
    before = server.metric("vllm:generation_tokens_total")
    body = LONG | {"max_tokens": 400, "stream": streamed}
    if streamed:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=server.headers) as response:
            assert next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.post(body, timeout=0.3)
    server.wait_until(server.is_idle, 10)
    assert server.metric("vllm:generation_tokens_total") - before < 380


def test_slow_readers_do_not_block_others(server):
    body = json.dumps(LONG | {"max_tokens": 400, "stream": True, "n": 8, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sleepers = []
    for _ in range(4):
        sleeper = socket.socket()
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sleeper.connect(("127.0.0.1", server.port))
        sleeper.sendall(head.encode() + body)
        sleepers.append(sleeper)
    try:
        alone = server.text(prompt="the cat", rad={"beta": 3})
        assert all(server.text(prompt="the cat", rad={"beta": 3}) == alone for _ in range(3))
    finally:
        for sleeper in sleepers:
            sleeper.close()
    server.wait_until(server.is_idle, 30)


def test_newer_weights_are_swapped_in_between_requests(server):
    old = {prompt: server.text(prompt=prompt) for prompt in PROMPTS}
    newer = tiny_llama(server.folder / "newer", seed=77)
    stop, faults, seen = threading.Event(), [], set()

    def keep_asking():
        while not stop.is_set():
            text = server.post({"prompt": "hello", "max_tokens": 16, "temperature": 0})
            if text.status_code != 200:
                faults.append(text.text)
            else:
                seen.add(text.json()["choices"][0]["text"])

    askers = [threading.Thread(target=keep_asking) for _ in range(3)]
    for asker in askers:
        asker.start()
    time.sleep(0.5)
    checkpoints = server.folder / "run" / "checkpoints"
    write_checkpoint(checkpoints / "step-3", newer)
    write_checkpoint(checkpoints / "step-9", tiny_llama(server.folder / "cut", seed=78), cut=True)
    server.wait_until(lambda: served_weights(server).startswith("step-3@"))
    time.sleep(0.5)
    stop.set()
    for asker in askers:
        asker.join(60)
    assert faults == []
    tokenizer = AutoTokenizer.from_pretrained(server.folder / "run" / "model")
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = newer.generate(ids, do_sample=False, max_new_tokens=16)[0, ids.size(1) :]
        assert server.text(prompt=prompt) == tokenizer.decode(expected, True)
    assert seen == {old["hello"], server.text(prompt="hello")}, "an answer mixed old and new weights"


def served_weights(server: Server) -> str:
    return httpx.get(f"{server.url}/v1/models", headers=server.headers, timeout=60).json()["weights"]


def write_checkpoint(folder, model, *, cut: bool = False) -> None:
    """A checkpoint as the trainer leaves it: DeepSpeed's file of whole weights (half of it if `cut`), the manifest."""
    aside = folder.with_name(folder.name + ".partial")
    states = aside / "trainer" / "deepspeed" / "mp_rank_00_model_states.pt"
    states.parent.mkdir(parents=True)
    torch.save({"module": {f"model.{name}": tensor for name, tensor in model.state_dict().items()}}, states)
    write_manifest(aside, Manifest(TrainerState(), config={}, libraries={}, evaluation={}))
    if cut:
        os.truncate(states, states.stat().st_size // 2)
    aside.rename(folder)


def test_weights_that_do_not_fit_are_left_alone(server):
    before = served_weights(server), server.text(prompt="hello")
    write_checkpoint(server.folder / "run" / "checkpoints" / "step-10", tiny_llama(server.folder / "other", vocab=80))
    server.wait_until(lambda: server.metric("rad_server_weight_refusals_total") == 1)
    assert (served_weights(server), server.text(prompt="hello")) == before


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def replicas() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any("ServeReplica" in word for word in _words(child))]


def replica_pids() -> set[int]:
    return {replica.pid for replica in replicas()}


def replica_memory() -> int:
    """Bytes of the replica and its engine."""
    processes = [process for replica in replicas() for process in (replica, *replica.children(recursive=True))]
    return sum(process.memory_info().rss for process in processes)


def test_a_killed_replica_is_replaced(server):
    (replica,) = replicas()
    engines = replica.children(recursive=True)
    weights = served_weights(server)
    os.kill(replica.pid, signal.SIGKILL)
    server.wait_until(lambda: not any(engine.is_running() and engine.status() != "zombie" for engine in engines), 20)
    try:  # a new request waits for the new replica, or is told at once that the old one is gone
        assert server.post({"prompt": "hello", "max_tokens": 4}, timeout=2).json()["error"]["code"] in (500, 503)
    except httpx.ReadTimeout:
        assert server.process.poll() is None
    server.wait_until(lambda: httpx.get(f"{server.url}/health", timeout=60).status_code == 200, 420)
    assert replica_pids() not in ({replica.pid}, set())
    assert served_weights(server) == weights
    assert server.text(prompt="hello", rad={"beta": 5})


def test_sigterm_finishes_accepted_requests_and_refuses_new_ones(server):
    bodies = [
        {"prompt": "hello", "max_tokens": length, "temperature": 0, "ignore_eos": True} | with_rad(rad)
        for length, rad in ((60, {"beta": 5}), (400, None))
    ]
    alone = [server.text(**body) for body in bodies]
    begun = threading.Barrier(9)
    texts: dict[int, str] = {}

    def read(number: int) -> None:
        body, text = bodies[number % 2] | {"stream": True}, ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=server.headers, timeout=90) as r:
            assert r.status_code == 200
            for place, line in enumerate(line for line in r.iter_lines() if line.startswith("data: ")):
                if place == 0:
                    begun.wait(60)
                if line == "data: [DONE]":
                    texts[number] = text
                    return
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])

    readers = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for reader in readers:
        reader.start()
    begun.wait(60)
    server.process.send_signal(signal.SIGTERM)
    answers = []
    while any(reader.is_alive() for reader in readers):
        try:
            answers.append(server.post({"prompt": "a", "max_tokens": 1}))
        except httpx.TransportError:
            break  # the port is closed: the server has finished
        time.sleep(0.1)
    for reader in readers:
        reader.join(90)
    assert texts == {number: alone[number % 2] for number in range(8)}
    refusals = [answer for answer in answers if answer.status_code != 200]
    assert refusals
    assert all(refusal.status_code == refusal.json()["error"]["code"] == 503 for refusal in refusals)
    assert server.process.wait(60) == 0
    assert "stopped" in server.log
