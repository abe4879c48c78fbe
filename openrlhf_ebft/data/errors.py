"""The errors of this folder, and what every text of a row must be."""

from __future__ import annotations

from typing import Any

from openrlhf_ebft.config.errors import UserError


class DataError(UserError):
    """Rows, files or a tokenizer that cannot be used; the message names the file and row, or the tokenizer."""


class RowFault(Exception):
    """A row that cannot become an example: a reason to count by, and a detail to show."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def check_text(text: str, where: str, role: str) -> str:
    """Returns `text`. Raises RowFault where it is empty or no UTF-8; `where` and `role` name it."""
    if not text.strip():
        raise RowFault(f"empty {role}", f"{where} is empty: the {role} needs at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Reading marks an undecodable byte 0xNN as U+DCNN.
        what = f"byte {code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else f"half a surrogate pair U+{code:04X}"
        raise RowFault("not UTF-8", f"{where} is not UTF-8 text: {what} at character {error.start}") from None
    return text


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    return "null" if value is None else f"a {type(value).__name__} ({value!r:.40})"
