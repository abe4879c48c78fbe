"""Bodies and fields: what is let through unchanged, and one refusal for every way to be wrong."""

import json

import pytest

from openrlhf_ebft.config.serving import LimitsConfig, ServingConfig
from openrlhf_ebft.serving.errors import RequestError, error_object
from openrlhf_ebft.serving.rad_fields import RADFieldReader
from openrlhf_ebft.serving.request_body import parse_object
from openrlhf_ebft.serving.request_fields import check_fields

LIMITS = LimitsConfig(max_tokens=64, n=4, prompts=3, logprobs=5)
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def reader():
    models = {"good": {"path": "g"}, "bad": {"path": "b"}}
    return RADFieldReader(ServingConfig(model={"path": "m"}, reward_models=models, limits={"top_k": 30}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "a"} x',
        b"[]",
        b"3",
        b'"text"',
        b"null",
        b'{"prompt": "\xff"}',
        '{"prompt": "ä"}'.encode("utf-16"),
        '{"prompt": "ä"}'.encode("latin-1"),
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\udc00b"}',
        b'{"a": ' * 100 + b"1" + b"}" * 100,
        b"[" * 100000,
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a\nb"}',
    ],
)
def test_broken_bodies_are_refused(data):
    with pytest.raises(RequestError) as refused:
        parse_object(data)
    assert refused.value.status == 400
    json.dumps(error_object(str(refused.value), 400)).encode("ascii")


def test_a_whole_body_arrives_unchanged():
    body = {"prompt": "Grüße 😀 \\ud83d", "n": 2, "stop": ["a"], "rad": {"weights": {"good": -1.5e-3}}}
    assert parse_object(json.dumps(body).encode()) == body
    assert parse_object(json.dumps(body, ensure_ascii=False).encode()) == body


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 5), ("n", 1.0), ("n", True), ("n", "2"), ("n", -1), ("n", 10**400),
        ("max_tokens", 0), ("max_tokens", 65), ("max_tokens", "5"), ("max_tokens", 5.5), ("max_tokens", [5]),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("seed", 2**63), ("seed", "1"),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("min_tokens", -1),
        ("stream", "true"), ("stream", 1), ("echo", 0), ("user", 5), ("logprobs", 6), ("logprobs", True),
        ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", {"a": 1}), ("stop", ["x"] * 17),
        ("stop_token_ids", ["1"]), ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("stop_token_ids", [1] * 65),
        ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "1"}),
        ("logit_bias", {str(number): 1 for number in range(301)}),
        ("prompt", ""), ("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", ""]), ("prompt", {"a": 1}),
        ("prompt", ["a"] * 4), ("prompt", [1, "a"]), ("prompt", [-1]), ("prompt", [1.5]), ("prompt", [True]),
        ("prompt", [["a"]]), ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
def test_wrong_values_name_their_field(field, value):
    body = {"prompt": "hello", field: value}
    with pytest.raises(RequestError) as refused:
        check_fields(body, LIMITS, is_chat=False)
    assert refused.value.param == field
    assert field in str(refused.value)
    assert len(str(refused.value)) < 1200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": "a", "use_beam_search": True},
        {"prompt": "a", "prompt_embeds": "AAAA"},
        {"prompt": "a", "kv_transfer_params": {}},
        {"prompt": "a", "request_id": "x"},
        {"prompt": "a", "priority": -5},
        {"prompt": "a", "best_of": 3},
        {"prompt": "a", "structured_outputs": {"regex": "(a+)+$"}},
        {"prompt": "a", "x" * 10000: 1},
        {"messages": CHAT},
    ],
)
def test_fields_that_this_server_has_not_are_refused(body):
    with pytest.raises(RequestError) as refused:
        check_fields(body, LIMITS, is_chat=False)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost"}}]}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
        {"messages": CHAT, "tools": []},
        {"messages": CHAT, "chat_template": "{{ 1 }}"},
        {"messages": CHAT, "response_format": {"type": "json_object"}},
        {"messages": CHAT, "logprobs": 3},
        {"messages": CHAT, "prompt": "a"},
        {"messages": CHAT * 1001},
    ],
)
def test_wrong_chats_are_refused(body):
    with pytest.raises(RequestError):
        check_fields(body, LIMITS, is_chat=True)


def test_right_requests_pass_and_null_counts_as_absent():
    body = {"prompt": ["a", "b"], "n": 4, "max_tokens": 64, "temperature": 0, "stop": None, "seed": -(2**63)}
    check_fields(body, LIMITS, is_chat=False)
    assert "stop" not in body
    check_fields({"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}, LIMITS, is_chat=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    check_fields({"messages": parts, "response_format": {"type": "text"}, "logprobs": True}, LIMITS, is_chat=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"rad": 5},
        {"rad": {}},
        {"rad": []},
        {"rad": {"beta": -1}},
        {"rad": {"beta": "20"}},
        {"rad": {"beta": True}},
        {"rad": {"beta": 10**400}},
        {"rad": {"beta": 1, "top_k": 0}},
        {"rad": {"beta": 1, "top_k": 31}},
        {"rad": {"beta": 1, "top_k": 1.5}},
        {"rad": {"beta": 1, "invert": "yes"}},
        {"rad": {"beta": 1, "reward_model": "nope"}},
        {"rad": {"beta": 1, "reward_model": 5}},
        {"rad": {"beta": 1, "score_index": -1}},
        {"rad": {"beta": 1, "score_transform": "tanh"}},
        {"rad": {"beta": 1, "strength": 2}},
        {"rad": {"weights": {}}},
        {"rad": {"weights": {"nope": 1}}},
        {"rad": {"weights": {"good": "1"}}},
        {"rad": {"weights": ["good=1"]}},
        {"rad": {"weights": {"good": 1}, "invert": True}},
        {"rad": {"beta": 1}, "vllm_xargs": {"rad_beta": 1}},
        {"rad": {"beta": 1}, "rad_trace": "yes"},
        {"rad_trace": True},
        {"vllm_xargs": {}},
        {"vllm_xargs": 5},
        {"vllm_xargs": {"rad_beta": -1}},
        {"vllm_xargs": {"rad_bta": 1}},
        {"vllm_xargs": {"rad_beta": 1, "other": 2}},
        {"vllm_xargs": {"rad_weights": "good=1"}},
    ],
)
def test_wrong_rad_arguments_are_refused(reader, fields):
    with pytest.raises(RequestError) as refused:
        reader.take({"prompt": "a"} | fields)
    assert refused.value.param in ("rad", "rad_trace", "vllm_xargs")


def arguments(fields):
    """Arguments without the ids that differ from request to request."""
    return {name: value for name, value in fields.arguments.items() if name not in ("rad_report", "rad_trace")}


def test_nested_and_flat_spellings_say_the_same(reader):
    nested = reader.take({"rad": {"beta": 20, "top_k": 5, "reward_model": "bad", "invert": True}})
    flat = reader.take({"vllm_xargs": {"rad_beta": 20, "rad_top_k": 5, "rad_reward_model": "bad", "rad_invert": True}})
    assert arguments(nested) == arguments(flat)
    weighted = reader.take({"rad": {"weights": {"good": 10, "bad": -20}}})
    assert arguments(weighted) == arguments(reader.take({"vllm_xargs": {"rad_weights": ["good=10.0", "bad=-20.0"]}}))
    assert reader.take({"prompt": "a"}) is None


def test_ids_of_traces_and_reports_are_none_that_a_client_can_choose(reader):
    body = {"prompt": "a", "rad": {"beta": 1, "trace": "of-another", "report": "of-another"}, "rad_trace": True}
    first, second = reader.take(dict(body)), reader.take(dict(body))
    assert "of-another" not in first.arguments.values()
    assert len({first.trace_id, second.trace_id, None}) == 3
    assert first.arguments["rad_trace"] == first.trace_id
    assert first.arguments["rad_report"] == first.report_id
    without = reader.take({"rad": {"beta": 1, "trace": "x"}})
    assert without.trace_id is None
    assert "rad_trace" not in without.arguments
