"""Whole modules of the running Python's standard library: raw documents on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from openrlhf_ebft.data.stdlib_pairs import source_files, stdlib_root, write_json_lines


def stdlib_modules(root: Path | None = None) -> Iterator[dict[str, str]]:
    """Yields `text` and `source` of every module below `root` that is not empty, in the order of the paths.

    `root` is the standard library's folder by default. Files that are not UTF-8 are test data of the library and
    left out.
    """
    root = root or stdlib_root()
    for path in source_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            yield {"text": text, "source": module}


def write_stdlib_modules(out: Path) -> int:
    """Writes the modules as JSON lines, complete or not at all; returns their number."""
    return write_json_lines(stdlib_modules(), out)
