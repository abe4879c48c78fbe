"""Flags on the command line: `--section.key value` or `--section.key=value`, spelled as the key path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from openrlhf_ebft.config.keys import accepts_null, accepts_text, find_field, suggest
from openrlhf_ebft.config.yaml_io import KeyPath, parse_scalar

_NULLS = ("null", "~", "")


def parse_overrides(model: type[BaseModel], flags: Sequence[str]) -> tuple[dict[KeyPath, Any], list[str]]:
    """Returns the value of every flag by key path, and one sentence for every flag that is wrong.

    Values are read as YAML unless the field takes text, which is kept as written. A flag given twice is wrong:
    the user cannot mean both.
    """
    values: dict[KeyPath, Any] = {}
    problems: list[str] = []
    position = 0
    while position < len(flags):
        flag = flags[position]
        position += 1
        if not flag.startswith("--"):
            problems.append(f"{flag!r} is not a flag: write --section.key value")
            continue
        name, equals, text = flag[2:].partition("=")
        if not equals and position < len(flags) and not flags[position].startswith("--"):
            text, equals = flags[position], "="
            position += 1
        path = tuple(name.split("."))
        field = find_field(model, path)
        if field is None:
            problems.append(_unknown_flag(model, name, path))
        elif not equals:
            problems.append(f"--{name} has no value: write --{name} value")
        elif path in values:
            problems.append(f"--{name} is given twice; keep one")
        else:
            try:
                values[path] = _read_value(text, accepts_text(field), accepts_null(field))
            except (yaml.YAMLError, ValueError, RecursionError):
                problems.append(f"--{name} = {text!r}: not a valid YAML value")
    return values, problems


def apply_overrides(data: dict[str, Any], values: dict[KeyPath, Any]) -> None:
    """Writes override values into the nested `data` of a file, in place."""
    for path, value in values.items():
        target = data
        for key in path[:-1]:
            if not isinstance(target.get(key), dict):
                target[key] = {}
            target = target[key]
        target[path[-1]] = value


def _read_value(text: str, is_text: bool, is_nullable: bool) -> Any:
    if is_text:
        return None if is_nullable and text in _NULLS else text
    return parse_scalar(text)


def _unknown_flag(model: type[BaseModel], name: str, path: KeyPath) -> str:
    if path[0] in model.model_fields and len(path) == 1:
        return f"--{name} is a section: write --{name}.key value"
    return f"--{name}: unknown flag; {suggest(model, path, prefix='--')}"
