"""Rows of text files (.jsonl .json .csv), each with the place it came from."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.report import DataReport


@dataclass(frozen=True)
class Row:
    """One row as it was read: column name -> value."""

    place: str  # "file:line", or "name, row N" (from 1) where rows are not lines
    values: Mapping[str, Any]


Reader = Callable[[Path, DataReport], Iterator[Row]]


def read_jsonl(path: Path, report: DataReport) -> Iterator[Row]:
    """Yields the object of every line; blank lines are no rows. A broken line is a fault of that line alone."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            report.rows_read += 1
            place = f"{path}:{number}"
            try:
                value = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
            except UnicodeDecodeError as error:
                report.fault(place, "not UTF-8", f"not UTF-8 text: byte {line[error.start]:#04x} at {error.start}")
            except (ValueError, RecursionError) as error:
                report.fault(place, "broken JSON", f"broken JSON: {error}")
            else:
                yield from _object_row(place, value, report)


def read_json(path: Path, report: DataReport) -> Iterator[Row]:
    """Yields the objects of a JSON list; a file that holds one object a line is read as JSON lines.

    Raises:
        DataError: the file is neither; nothing of it can be used, so this is an error in skip mode too.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}") from None
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("{"):
            yield from read_jsonl(path, report)
            return
        raise DataError(f"{path}: broken JSON: {error}") from None
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise DataError(f"{path}: must hold a list of objects, but holds a {type(content).__name__}")
    for number, value in enumerate(content, start=1):
        report.rows_read += 1
        yield from _object_row(f"{path}, row {number}", value, report)


def read_csv(path: Path, report: DataReport) -> Iterator[Row]:
    """Yields the records below the header line. Bytes that are not UTF-8 stay marked for the check of their column."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, None)
        if not header:
            raise DataError(f"{path}: no header line with column names")
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise DataError(f"{path}:1: column {repeated[0]!r} stands twice in the header")
        number = 0
        while True:
            first_line = reader.line_num + 1
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                record = None
                detail = f"broken CSV: {error}"
            if record == []:
                continue  # a blank line is no row
            number += 1
            report.rows_read += 1
            place = f"{path}:{first_line} (row {number})"
            if record is not None and len(record) != len(header):
                detail = f"broken CSV: {len(record)} fields, but the header names {len(header)}"
                record = None
            if record is None:
                report.fault(place, "broken CSV", detail)
                continue
            yield Row(place, dict(zip(header, record, strict=True)))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object. Raises ValueError for a key that stands twice: one of its values would be lost."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values


def _object_row(place: str, value: Any, report: DataReport) -> Iterator[Row]:
    if isinstance(value, dict):
        yield Row(place, value)
    else:
        report.fault(place, "not an object", f"must be an object with columns, but is a {type(value).__name__}")
