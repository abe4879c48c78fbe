"""One configuration on its way from another implementation's keys to this one's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["mapped", "changed", "dropped"]

_ABSENT = object()
# Both trainers read YAML 1.1, where these plain words are no text.
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


class WrongValue(Exception):
    """A value of another kind than its key takes; the message names both."""

    def __init__(self, key: str, value: Any, wanted: str) -> None:
        super().__init__(f"{key} = {value!r}: must be {wanted}")


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

    def number(self, key: str) -> float:
        """The key's value, its default for null, 0 without one. Raises WrongValue for anything but a finite number."""
        number = self._number_or_nan(key)
        if math.isnan(number):
            raise WrongValue(key, self._value_or_default(key), "a number")
        return number

    def whole(self, key: str, *, least: int | None = None) -> int:
        """The same for whole numbers; WrongValue below `least`, too."""
        number = self._number_or_nan(key)
        if not number.is_integer() or (least is not None and number < least):
            wanted = "a whole number" + ("" if least is None else f" of at least {least}")
            raise WrongValue(key, self._value_or_default(key), wanted)
        return int(number)

    def flag(self, key: str) -> bool:
        """The key's value, its default for null, false without one. Raises WrongValue unless it is true or false."""
        value = self._value_or_default(key)
        value = False if value is None else value
        meant = _WORDS.get(value.lower(), value) if isinstance(value, str) else value
        if meant not in (True, False):
            raise WrongValue(key, value, "true or false")
        return bool(meant)

    def _number_or_nan(self, key: str) -> float:
        value = self._value_or_default(key)
        try:
            number = math.nan if isinstance(value, bool) else float(0 if value is None else value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        return number if math.isfinite(number) else math.nan

    def _value_or_default(self, key: str) -> Any:
        value = self.value(key)
        return self._defaults.get(key) if value is None else value

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

    def has(self, path: str) -> bool:
        """Whether our key is set."""
        section, name = path.split(".")
        return name in self.data.get(section, {})

    def _set(self, path: str, value: Any) -> None:
        *sections, name = path.split(".")
        place = self.data
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; at least 1."""
    return max(divisor for divisor in range(1, max(min(number, limit), 1) + 1) if number % divisor == 0)


def safe_name(text: str) -> str:
    """A run name: what is no letter, digit, dot, dash or underscore becomes a dash."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text)
    return kept.strip("-.") or "imported"
