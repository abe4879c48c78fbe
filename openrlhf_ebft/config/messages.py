"""Pydantic's errors said again as `section.key = value: what is allowed`."""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from openrlhf_ebft.config.keys import find_field
from openrlhf_ebft.config.yaml_io import KeyPath

_ALLOWED = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must match {pattern}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_too_short": "must not be empty",
    "string_too_long": "takes {max_length} or fewer characters",
    "string_type": "must be text; put quotes around it",
    "tuple_type": "must be a list such as [0.25, 0.5]",
    "too_short": "needs {min_length} or more entries",
    "too_long": "takes {max_length} or fewer entries",
    "extra_forbidden": "unknown key",
    "dict_type": "must be a mapping such as {name: {path: folder}}",
    "model_type": "must be a section with keys of its own",
    "model_attributes_type": "must be a section with keys of its own",
}


def describe_errors(model: type[BaseModel], error: ValidationError, origins: dict[KeyPath, str]) -> list[str]:
    """Returns one sentence for each error; `origins` says for a key path where its value was written."""
    return [_describe(model, detail, origins) for detail in error.errors(include_url=False)]


def _describe(model: type[BaseModel], detail: ErrorDetails, origins: dict[KeyPath, str]) -> str:
    path = tuple(str(part) for part in detail["loc"])
    name = ".".join(path)
    if detail["type"] == "missing":
        return _describe_missing(model, path, name)
    value = "null" if detail["input"] is None else repr(detail["input"])
    origin = origins.get(path) or origins.get(path[:-1])
    return f"{name} = {value}: {_allowed(detail)}{f' ({origin})' if origin else ''}"


def _describe_missing(model: type[BaseModel], path: KeyPath, name: str) -> str:
    if path[-1].isdigit():
        return f"{'.'.join(path[:-1])}: entry {path[-1]} (from 0) is missing"
    field = find_field(model, path)
    if field is None and find_field(model, path[:1]) is not None:
        return f"{name}: missing, and it has no default"  # inside a mapping with names of the user's
    if field is None:
        return f"{name}: this section is missing and has keys without a default"
    return f"{name}: missing, and it has no default ({field.description})"


def _allowed(detail: ErrorDetails) -> str:
    context: dict[str, Any] = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        names = [text or number for text, number in choices]
        nearest = difflib.get_close_matches(str(detail["input"]), names, n=1)
        return f"must be one of {', '.join(names)}" + (f"; did you mean {nearest[0]}?" if nearest else "")
    template = _ALLOWED.get(detail["type"])
    if template is None:
        return detail["msg"][:1].lower() + detail["msg"][1:]
    return template.format(**context)
