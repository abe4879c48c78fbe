"""Key paths of a configuration: which exist, and the nearest right one to a wrong one."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from openrlhf_ebft.config.yaml_io import KeyPath


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the model class of a field that is a section, None for a plain field."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def iterate_fields(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yields every plain field of `model` and its sections with its key path, in the order of the file."""
    for name, field in model.model_fields.items():
        section = section_class(field)
        if section is None:
            yield prefix + (name,), field
        else:
            yield from iterate_fields(section, prefix + (name,))


def find_field(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Returns the plain field at `path`, or None when there is none."""
    return dict(iterate_fields(model)).get(path)


def unknown_keys(model: type[BaseModel], data: dict[Any, Any], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yields the path of every key in `data` that `model` does not have."""
    for key, value in data.items():
        path = prefix + (str(key),)
        field = model.model_fields.get(str(key))
        if field is None:
            yield path
            continue
        section = section_class(field)
        if section is not None and isinstance(value, dict):
            yield from unknown_keys(section, value, path)


def suggest(model: type[BaseModel], path: KeyPath, prefix: str = "") -> str:
    """Returns a sentence with the right key nearest to the wrong `path`, or the keys that exist there.

    `prefix` is put before the key: `--` where the user wrote a flag.
    """
    nearest = _nearest_key(model, path)
    if nearest is not None:
        return f"did you mean {prefix}{nearest}?"
    section = [name[-1] for name, _ in iterate_fields(model) if len(path) > 1 and name[:-1] == path[:-1]]
    return f"known here: {', '.join(section or model.model_fields)}"


def _nearest_key(model: type[BaseModel], path: KeyPath) -> str | None:
    known = {".".join(known_path): known_path for known_path, _ in iterate_fields(model)}
    wanted = ".".join(path).replace("-", "_")
    leaf = path[-1].replace("-", "_")
    if wanted in known:
        return wanted
    same_leaf = [name for name, known_path in known.items() if known_path[-1] == leaf]
    if same_leaf:
        return _nearest(wanted, same_leaf, cutoff=0.0)
    if len(path) == 1 and (section := _nearest(wanted, list(model.model_fields), cutoff=0.8)) is not None:
        return section
    same_section = [name for name, known_path in known.items() if known_path[:-1] == path[:-1]]
    nearest = _nearest(wanted, same_section, cutoff=0.8) or _nearest(wanted, list(known), cutoff=0.8)
    if nearest is not None:
        return nearest
    by_leaf = {known_path[-1]: name for name, known_path in known.items()}
    nearest_leaf = _nearest(leaf, list(by_leaf), cutoff=0.7)
    return by_leaf[nearest_leaf] if nearest_leaf is not None else None


def accepts_text(field: FieldInfo) -> bool:
    """Whether a field takes any text, so that a flag's value such as `2024` must not become a number."""
    is_union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    return field.annotation is str or (is_union and str in typing.get_args(field.annotation))


def accepts_null(field: FieldInfo) -> bool:
    """Whether a field may be null."""
    return type(None) in typing.get_args(field.annotation)


def _nearest(text: str, candidates: list[str], cutoff: float) -> str | None:
    matches = difflib.get_close_matches(text, candidates, n=1, cutoff=cutoff)
    return matches[0] if matches else None
