"""YAML in and out with the plain scalars of YAML 1.2: `1e-6` is a number, `on`, `010` and dates stay text."""

from __future__ import annotations

import re
from typing import Any

import yaml

from openrlhf_ebft.config.errors import ConfigError

KeyPath = tuple[str, ...]

# Tag, pattern and possible first letters of every plain scalar that is not text.
_SCALARS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes exactly what _Loader would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """Returns the content of one YAML document and the line (from 1) of every key path.

    Raises:
        ConfigError: broken YAML, or a key that stands twice in one mapping.
    """
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a control character
        raise ConfigError(source, [f"not valid YAML: {str(error).splitlines()[0]}"]) from None
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[KeyPath, int] = {}
        duplicates: list[str] = []
        _index_keys(node, (), lines, duplicates)
        if duplicates:
            raise ConfigError(source, duplicates)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        raise ConfigError(source, [_yaml_problem(error)]) from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # `!!int abc`, thousands of digits or of brackets
        raise ConfigError(source, [f"not valid YAML: {error}"]) from None
    finally:
        loader.dispose()


def parse_scalar(text: str) -> Any:
    """Returns the value of a flag's text read as YAML, so `3` is a number and `[1, 2]` a list."""
    return yaml.load(text, Loader=_Loader)


def dump_yaml(data: Any) -> str:
    """Returns YAML that `parse_yaml` reads back as equal data, keys in their given order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _index_keys(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], duplicates: list[str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = path + (str(key_node.value),)
        line = key_node.start_mark.line + 1
        if key in lines and key_node.value != "<<":
            duplicates.append(f"{'.'.join(key)} stands twice: line {lines[key]} and line {line}; keep one")
        lines[key] = line
        _index_keys(value_node, key, lines, duplicates)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}not valid YAML: {what}"
