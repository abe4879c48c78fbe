"""One configuration on its way from another implementation's keys to this one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["mapped", "changed", "dropped"]

_ABSENT = object()


@dataclass(frozen=True)
class KeyNote:
    """What became of one key."""

    key: str  # as the other implementation spells it
    value: Any
    action: Action  # mapped: the same meaning; changed: another value or meaning; dropped: nothing here reads it
    targets: tuple[str, ...]  # our keys, with their values
    why: str  # empty for a plain mapping


class Translation:
    """Takes keys from `source` and sets ours; every key of the source ends in exactly one note."""

    def __init__(self, source: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """`source`: flat keys. `defaults`: what the other implementation takes for keys that are not in the file."""
        self._source = dict(source)
        self._defaults = defaults
        self._left = dict(source)
        self.notes: list[KeyNote] = []
        self.data: dict[str, Any] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._source

    def value(self, key: str) -> Any:
        """The key's value, else the other implementation's default, else None. Leaves no note."""
        return self._source.get(key, self._defaults.get(key))

    def take(self, key: str, targets: Mapping[str, Any], *, changed: str = "") -> None:
        """Sets our keys (by path, such as `rollout.temperature`) and notes that `key` was mapped.

        Args:
            key: key of the source. If it is not in the file, its default there is what is translated.
            targets: our values by key path.
            changed: why value or meaning differ; empty when they do not.
        """
        for path, value in targets.items():
            self._set(path, value)
        shown = tuple(f"{path} = {value}" for path, value in targets.items())
        value = self._left.pop(key, _ABSENT)
        if value is _ABSENT:
            if key in self._source:
                return  # noted already, with another of its targets
            value, changed = self.value(key), f"not in the file: the default there{f'; {changed}' if changed else ''}"
        self.notes.append(KeyNote(key, value, "changed" if changed else "mapped", shown, changed))

    def drop(self, key: str, why: str) -> None:
        """Notes that nothing here reads `key`; a key that is not in the file is passed over."""
        if key in self._left:
            self.notes.append(KeyNote(key, self._left.pop(key), "dropped", (), why))

    def map_simple(self, table: Mapping[str, str]) -> None:
        """Keys whose value and meaning are the same here, where they are in the file or differ by default."""
        for key, path in table.items():
            if key in self._source or key in self._defaults:
                if self.value(key) is None:
                    self.drop(key, "null there: the default is used here")
                else:
                    self.take(key, {path: self.value(key)})

    def drop_all(self, table: Mapping[str, str]) -> None:
        """Drops keys for known reasons."""
        for key, why in table.items():
            self.drop(key, why)

    def finish(self, unknown: str) -> None:
        """Drops what is left: keys that are not known."""
        for key in list(self._left):
            self.drop(key, unknown)

    def keep(self, path: str, value: Any) -> None:
        """Sets one of our keys without a counterpart there."""
        self._set(path, value)

    def _set(self, path: str, value: Any) -> None:
        *sections, name = path.split(".")
        place = self.data
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; at least 1."""
    return max(divisor for divisor in range(1, max(limit, 1) + 1) if number % divisor == 0)


def safe_name(text: str) -> str:
    """A run name: what is no letter, digit, dot, dash or underscore becomes a dash."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text)
    return kept.strip("-.") or "imported"
