"""Reads a foreign configuration, expands its sweep, and checks what came out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from openrlhf_ebft.config.errors import ConfigError
from openrlhf_ebft.config.importing import authors, axolotl
from openrlhf_ebft.config.importing.authors_keys import LIST_KEYS, MARKS
from openrlhf_ebft.config.importing.authors_keys import NEEDED as AUTHORS_NEEDED
from openrlhf_ebft.config.importing.axolotl_keys import NEEDED as AXOLOTL_NEEDED
from openrlhf_ebft.config.importing.translation import KeyNote, Translation, WrongValue, safe_name
from openrlhf_ebft.config.messages import describe_errors
from openrlhf_ebft.config.rules import check_rules
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.config.yaml_io import parse_yaml

_REFERENCE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class ImportedConfig:
    """One configuration that this package can run."""

    name: str
    data: dict[str, Any]  # what is not the default, by section
    config: EBFTConfig
    notes: tuple[KeyNote, ...]  # one for each key of the source, and for defaults that differ


def import_config(path: Path) -> list[ImportedConfig]:
    """Translates a file: one configuration, or one for each point of its sweep.

    Raises:
        ConfigError: the file cannot be read, is of no known kind, or what comes out cannot run; names every fault.
    """
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(source, [f"cannot be read: {error}"]) from None
    nested, _ = parse_yaml(text, source)
    if not isinstance(nested, dict):
        raise ConfigError(source, ["holds no keys"])
    if nested.get("rl") == "ebft" or "ebft" in nested:
        return [_finish(_translated(axolotl.translate, nested, source), source, "", AXOLOTL_NEEDED)]
    if not MARKS & _all_keys(nested):
        raise ConfigError(
            source,
            [
                "neither the EBFT authors' flat keys (such as pretrain, n_samples_per_prompt, context_max_len) nor "
                "Axolotl's `rl: ebft` with a section `ebft`"
            ],
        )
    points = list(_points(nested, source))
    return [
        _finish(_translated(authors.translate, keys, source), source, suffix, AUTHORS_NEEDED) for keys, suffix in points
    ]


def _translated(
    translate: Callable[[Mapping[str, Any]], Translation], keys: Mapping[str, Any], source: str
) -> Translation:
    try:
        return translate(keys)
    except WrongValue as error:
        raise ConfigError(source, [str(error)]) from None


def _all_keys(nested: Mapping[str, Any]) -> set[str]:
    sweeps = nested.get("sweep")
    sweeps = sweeps if isinstance(sweeps, list) else []
    return set(nested) | {key for entry in sweeps if isinstance(entry, Mapping) for key in entry}


def _points(nested: Mapping[str, Any], source: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every combination of the lists of every sweep entry over the other keys, with a suffix for its name."""
    base = {key: value for key, value in nested.items() if key != "sweep"}
    entries = nested.get("sweep") or [{}]
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(source, ["sweep: must be a list of mappings from keys to lists of values"])
    for number, entry in enumerate(entries, start=1):
        merged = base | dict(entry)
        lists = {k: v for k, v in merged.items() if isinstance(v, list) and k not in LIST_KEYS}
        empty = [key for key, values in lists.items() if not values]
        if empty:
            raise ConfigError(source, [f"{key}: an empty list leaves nothing to run" for key in empty])
        varied = [key for key, values in lists.items() if len(values) > 1]
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            parts = [f"set{number}"] if len(entries) > 1 else []
            parts += [f"{key}-{chosen[key]}" for key in varied]
            yield _resolve(merged | chosen, source), "-".join(parts)


def _resolve(keys: dict[str, Any], source: str) -> dict[str, Any]:
    """Replaces `${other_key}` by that key's value: whole values keep their type, inside a text it becomes text."""

    def find(name: str, text: str, depth: int) -> Any:
        if name not in keys or depth > len(keys):
            raise ConfigError(source, [f"{text}: no key {name} to take the value from"])
        return value_of(keys[name], depth + 1)

    def value_of(value: Any, depth: int = 0) -> Any:
        if not isinstance(value, str):
            return value
        if whole := _REFERENCE.fullmatch(value.strip()):
            return find(whole[1], value, depth)
        return _REFERENCE.sub(lambda part: str(find(part[1], value, depth)), value)

    return {key: value_of(value) for key, value in keys.items()}


def _finish(t: Translation, source: str, suffix: str, needed: Mapping[str, str]) -> ImportedConfig:
    """`needed`: our keys that have no default, with the key there that gives each."""
    missing = [f"{key}: missing; it is {path} here" for path, key in needed.items() if not t.has(path)]
    if missing:
        raise ConfigError(source, missing)
    name = safe_name("-".join(part for part in (t.data["name"], suffix) if part))
    data = {"name": name, **{key: value for key, value in t.data.items() if key != "name"}}
    origins = {tuple(path.split(".")): f"from {note.key}" for note in t.notes for path in _paths(note)}
    try:
        config = EBFTConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source} as {name}", describe_errors(EBFTConfig, error, origins)) from None
    broken = check_rules(config)
    if broken:
        raise ConfigError(f"{source} as {name}", broken)
    return ImportedConfig(name, data, config, tuple(t.notes))


def _paths(note: KeyNote) -> Iterator[str]:
    return (target.partition(" = ")[0] for target in note.targets)
