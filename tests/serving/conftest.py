"""One real server for all tests of this folder: the command, Ray Serve, vLLM, two reward models, a followed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from transformers import LlamaForSequenceClassification

from tests.processes import free_port
from tests.tiny_models import CHAT_TEMPLATE, tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]
KEY = "a-key-for-tests"
START_S = 420


class Server:
    """A running `serve-rad` process."""

    def __init__(self, folder: Path, process: subprocess.Popen, port: int) -> None:
        self.folder = folder
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.headers = {"Authorization": f"Bearer {KEY}"}

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def post(self, body: dict, path: str = "/v1/completions", timeout: float = 120) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=self.headers, timeout=timeout)

    def complete(self, **body) -> dict:
        response = self.post({"temperature": 0, "max_tokens": 16} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, **body) -> str:
        return self.complete(**body)["choices"][0]["text"]

    def metric(self, name: str, **labels) -> float:
        """The sum of a metric over the labels that are not given."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=120).text.splitlines():
            if line.split("{")[0].split(" ")[0] == name and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def is_idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "rad_server_running_requests")
        return all(self.metric(name) == 0 for name in (*names, "rad_reward_cache_tokens_used"))

    def wait_until(self, condition, limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"not within {limit_s} s; the server's log:\n{self.log[-3000:]}"
            time.sleep(0.2)


def save_reward_model(folder: Path, seed: int) -> None:
    """A random one-column classifier with the tiny tokenizer; its scores differ much from token to token."""
    base = tiny_llama(folder, seed=seed)
    base.config.num_labels = 1
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(base.config)
    model.model.load_state_dict(base.model.state_dict())
    model.score.weight.data.normal_(std=0.5)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    tiny_llama(run / "model", seed=0)
    tiny_tokenizer(run / "model", chat_template=CHAT_TEMPLATE)
    save_reward_model(folder / "good", 1)
    save_reward_model(folder / "bad", 2)
    (folder / "keys").write_text(KEY + "\n")
    port = free_port()
    config = {
        "model": {"name": "tiny", "dtype": "float32"},
        "reward_models": {name: {"path": str(folder / name)} for name in ("good", "bad")},
        "rad": {"cache_tokens": 32768},
        "engine": {"kv_cache_gib": 0.1},
        "http": {"port": port, "api_keys_file": str(folder / "keys")},
        "limits": {"body_bytes": 65536, "max_tokens": 400, "prompt_tokens": 100, "top_k": 40},
        "replicas": {"threads": 1, "ongoing_requests": 100, "start_s": START_S},
        "follow": {"poll_s": 0.5},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "openrlhf_ebft.cli.main", "serve-rad", str(folder / "serve.yaml")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--follow", str(run)], stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "RAY_ADDRESS": ""}
        )
    server = Server(folder, process, port)
    try:
        server.wait_until(lambda: process.poll() is not None or _is_ready(server), START_S)
        assert process.poll() is None, server.log[-5000:]
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


def _is_ready(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def stream_events(lines) -> list[dict]:
    """The JSON objects of a finished event stream."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
