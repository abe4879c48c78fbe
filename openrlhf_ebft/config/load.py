"""From a YAML file and flags to a checked configuration, and back to YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from openrlhf_ebft.config.errors import ConfigError
from openrlhf_ebft.config.keys import iterate_fields, section_class, suggest, unknown_keys
from openrlhf_ebft.config.messages import describe_errors
from openrlhf_ebft.config.overrides import apply_overrides, parse_overrides
from openrlhf_ebft.config.rules import check_rules
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.config.yaml_io import KeyPath, dump_yaml, parse_yaml

Model = TypeVar("Model", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> EBFTConfig:
    """Reads a run's configuration, applies `--section.key value` flags and checks it, rules between keys included.

    Raises:
        ConfigError: names every fault found, with the file's line or the flag and what is allowed.
    """
    return load_typed(EBFTConfig, path, overrides, check_rules)


def load_typed(
    model: type[Model],
    path: str | Path,
    overrides: Sequence[str],
    rules: Callable[[Model], list[str]],
) -> Model:
    """Reads a file into any pydantic `model`; `rules` returns one sentence for each broken cross-field rule.

    Raises:
        ConfigError: as `load_config`.
    """
    source = str(path)
    data, lines = _read_mapping(path, source)
    _fill_empty_sections(model, data)
    values, problems = parse_overrides(model, overrides)
    origins = {key: f"{source}, line {line}" for key, line in lines.items()}
    for key in unknown_keys(model, data):
        problems.append(f"{'.'.join(key)}: unknown key; {suggest(model, key)} ({origins.get(key, source)})")
    apply_overrides(data, values)
    origins |= {key: f"flag --{'.'.join(key)}" for key in values}
    problems += _boolean_numbers(model, data, origins)
    if problems:
        raise ConfigError(source, problems)
    try:
        config = model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(source, describe_errors(model, error, origins)) from None
    broken = rules(config)
    if broken:
        raise ConfigError(source, broken)
    return config


def dump_config(config: BaseModel) -> str:
    """Returns YAML with every key of `config`, defaults included; it loads back to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


def _read_mapping(path: str | Path, source: str) -> tuple[dict[Any, Any], dict[KeyPath, int]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(source, ["no such file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(source, [f"not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}"]) from None
    except OSError as error:
        raise ConfigError(source, [f"cannot be read: {error.strerror}"]) from None
    data, lines = parse_yaml(text, source)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(source, [f"must hold sections such as `model:`, but holds a {type(data).__name__}"])
    return data, lines


def _fill_empty_sections(model: type[BaseModel], data: dict[Any, Any]) -> None:
    """A section whose keys are all commented out reads as null and means its defaults."""
    for name, field in model.model_fields.items():
        if section_class(field) is not None and name in data and data[name] is None:
            data[name] = {}


def _boolean_numbers(model: type[BaseModel], data: dict[Any, Any], origins: dict[KeyPath, str]) -> Iterator[str]:
    """Pydantic would take true for 1; nobody means that."""
    for path, field in iterate_fields(model):
        value: Any = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) and field.annotation is not bool:
            text = str(value).lower()
            place = f" ({origins[path]})" if path in origins else ""  # merged keys (<<) have none
            yield f"{'.'.join(path)} = {text}: must not be {text}; {field.description}{place}"
