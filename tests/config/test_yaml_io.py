"""Plain scalars follow YAML 1.2, keys stand once, and what is dumped reads back."""

import math

import pytest

from openrlhf_ebft.config.errors import ConfigError
from openrlhf_ebft.config.yaml_io import dump_yaml, parse_scalar, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("0.5", 0.5),
        ("-3", -3),
        ("0", 0),
        ("010", "010"),
        ("on", "on"),
        ("no", "no"),
        ("2026-01-01", "2026-01-01"),
        ("12:30", "12:30"),
        ("true", True),
        ("null", None),
        ("", None),
        ("none", "none"),
        ("[0.25, 1e-1]", [0.25, 0.1]),
        ("'7'", "7"),
    ],
)
def test_scalars(text, value):
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_infinity_is_read_as_a_number():
    assert math.isinf(parse_scalar("-.inf"))


@pytest.mark.parametrize(
    "text", ["1e-6", "010", "on", "null", "true", "3", "", "~", "a: b", "# no", "é", "<<", "-", "0x1f"]
)
def test_text_survives_a_round_trip(text):
    data = {"key": text, "list": [text], text or "empty": 1}
    assert parse_yaml(dump_yaml(data), "x")[0] == data


def test_duplicate_keys_are_named_with_both_lines():
    with pytest.raises(ConfigError, match=r"model\.path stands twice: line 2 and line 4"):
        parse_yaml("model:\n  path: a\n  dtype: b\n  path: c\n", "x.yaml")


def test_the_same_key_in_two_sections_is_fine():
    assert parse_yaml("a: {path: 1}\nb: {path: 2}\n", "x")[0] == {"a": {"path": 1}, "b": {"path": 2}}


def test_lines_of_keys():
    _, lines = parse_yaml("# head\nmodel:\n\n  path: a\nseed: 1\n", "x")
    assert lines == {("model",): 2, ("model", "path"): 4, ("seed",): 5}


@pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "\tx: 1", "a: 1\n---\nb: 2", "a: !!python/name:os.system x"])
def test_broken_yaml_names_the_place(text):
    with pytest.raises(ConfigError, match=r"run\.yaml: 1 problem\n.*line \d+, column \d+: not valid YAML"):
        parse_yaml(text, "run.yaml")


@pytest.mark.parametrize("text", ["a: !!int abc", "a: " + "9" * 5000, "a: " + "[" * 20000, "a: \x00"])
def test_values_that_cannot_be_made_are_no_traceback(text):
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse_yaml(text, "run.yaml")
