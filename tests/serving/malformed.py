"""Malformed requests of many kinds: arguments for `httpx.post`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

GOOD = {"prompt": "hello", "max_tokens": 4}
HUGE = 10**30
WRONG: dict[str, list[Any]] = {
    "n": [0, -1, 1.5, "2", True, HUGE, [1], {}],
    "max_tokens": [0, -4, 2.5, "4", False, HUGE, 401, []],
    "temperature": [-1, 3, "hot", True, 1e300, [], {}],
    "top_p": [0, -1, 2, "1", True, []],
    "top_k": [-2, 0.5, "3", True],
    "min_p": [-1, 2, "0", True],
    "seed": ["1", 1.5, HUGE, -HUGE, True, []],
    "stop": ["", [""], [1], {"a": 1}, ["x"] * 17, 5, True],
    "stop_token_ids": [["1"], [-1], 5, [HUGE], "1"],
    "logit_bias": [[], "x", {"x": 1}, {"1": 1e9}, {"1": "1"}, {"-1": 1}],
    "logprobs": [-1, 21, "1", True, 1.5],
    "stream": ["true", 1, 0, [], {}],
    "prompt": ["", [], {}, 5, True, [[]], [""], [-1], [1.5], [True], ["a", 1], [64], [HUGE], [1] * 101, ["a"] * 9],
    "presence_penalty": [3, "1", True],
    "repetition_penalty": [0, -1, "1", 1e300],
    "min_tokens": [-1, "1", HUGE],
    "echo": [1, "yes"],
    "user": [1, [], {}],
    "stream_options": [5, [], {"x": True}, {"include_usage": 1}],
    "model": ["nope", "../tiny", "tiny ", 5, [], {}],
    "rad": ["x", [], -5, {}, True, {"top_k": 3}, {"beta": -1}, {"beta": "1"}, {"beta": []},
            {"beta": 10**360}, {"beta": 1e39}, {"weights": {"good": 1e20}, "beta": 1e20},
            {"beta": 1, "top_k": 10**9}, {"beta": 1, "top_k": -1}, {"beta": 1, "top_k": True}, {"beta": 1, "x": 1},
            {"beta": 1, "reward_model": "nope"}, {"beta": 1, "reward_model": ["good"]}, {"beta": 1, "invert": "no"},
            {"beta": 1, "score_transform": "x"}, {"weights": {"nope": 1}}, {"weights": {"good": []}}, {"weights": {}}],
    "vllm_xargs": ["x", [], {}, {"rad_beta": -1}, {"rad_beta": "x"}, {"other": 1}, {"rad_weights": ["good"]}],
    "rad_trace": ["yes", 1, True],
    **{name: [1, "x", {}] for name in ("use_beam_search", "prompt_embeds", "tools", "__class__", "priority")},
}  # fmt: skip
RAW = [
    b"", b" ", b"{", b"}", b"null", b"[]", b"3", b'"x"', b"\xff\xfe{}", b"[" * 9999, b'{"a":' * 9999, b"a" * 70000,
    b'{"prompt":"a","n":NaN}', b'{"prompt":"a","temperature":Infinity}', b'{"prompt":"a","temperature":1e999}',
    b'{"prompt":"\\ud800"}', b'{"prompt":"a"}{}', b'{"prompt":"a","prompt":"b"}', b"{'prompt':'a'}", b'{"prompt":"a",}',
    b'{"seed":' + b"9" * 6000 + b"}", json.dumps(GOOD).encode("utf-16"), json.dumps(GOOD).encode("utf-32"),
    '{"prompt":"ä"}'.encode("latin-1"), b'\xef\xbb\xbf{"prompt":"a"}',
]  # fmt: skip
HEADERS = [
    *({"Authorization": value} for value in ("", "Bearer", "Bearer x", "Basic eA==", "Bearer " + "k" * 5000)),
    *({"Content-Type": value} for value in ("text/plain", "", "x", "application/json; charset=latin-1")),
    *({"Content-Encoding": value} for value in ("gzip", "br", "x")),
]


def malformed_requests(count: int) -> Iterator[dict[str, Any]]:
    """The first `count` of all kinds in turn, again with other harmless fields once all have come."""
    kinds: list[dict[str, Any]] = [
        {"json": GOOD | {field: value}} for field, values in WRONG.items() for value in values
    ]
    kinds += [{"content": data, "headers": {"Content-Type": "application/json"}} for data in RAW]
    kinds += [
        {"content": json.dumps(GOOD), "headers": {"Content-Type": "application/json"} | headers} for headers in HEADERS
    ]
    extras: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 2}, {"temperature": 0}]
    for number, kind in enumerate(itertools.islice(itertools.cycle(kinds), count)):
        extra = extras[number // len(kinds) % len(extras)]
        yield {**kind, "json": extra | kind["json"]} if "json" in kind else kind
