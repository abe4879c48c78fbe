"""Pairs (signature + docstring -> body) from the running Python's standard library: real data on every machine."""

from __future__ import annotations

import ast
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo",
    "ensurepip", "pydoc_data", "lib-dynload",
}  # fmt: skip


def stdlib_pairs(root: Path | None = None) -> Iterator[dict[str, str]]:
    """Yields `prompt`, `ground_truth` and `source` of every documented function below `root`, each text pair once.

    `root` is the standard library's folder by default. Files come in the order of their paths, functions in the
    order of the file, so one Python always gives the same rows.

    The prompt ends with the docstring's closing quotes and the ground truth begins with the line break: tokenizers of
    code join a line break and its indent, which a cut behind either would break. Together they are the function's
    own source, moved to the left margin.
    """
    root = root or stdlib_root()
    seen: set[tuple[str, str]] = set()
    for path in source_files(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for name, prompt, ground_truth in _file_pairs(path):
            if (prompt, ground_truth) not in seen:
                seen.add((prompt, ground_truth))
                yield {"prompt": prompt, "ground_truth": ground_truth, "source": f"{module}.{name}"}


def write_stdlib_pairs(out: Path) -> int:
    """Writes the pairs as JSON lines, complete or not at all; returns their number."""
    return write_json_lines(stdlib_pairs(), out)


def write_json_lines(rows: Iterable[dict[str, str]], out: Path) -> int:
    """Writes rows to a file that is complete or not there at all; returns their number."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                count += 1
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return count


def stdlib_root() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[Path]:
    """Python files below `root` in the order of their paths, without tests and installed packages."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _file_pairs(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (qualified name, prompt, ground truth) of the functions of a file that is valid Python in UTF-8."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return  # the library ships a few files that are broken or encoded otherwise on purpose
    lines = source.encode("utf-8").splitlines(keepends=True)  # ast counts columns in UTF-8 bytes
    for name, node in _functions(tree, ""):
        pair = _split_function(lines, node)
        if pair is not None:
            yield name, *pair


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields functions and methods in the order of the file; functions inside functions belong to their body."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _split_function(lines: list[bytes], node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str] | None:
    """Returns (signature + docstring, body) at the left margin, None without both or where that changes the code."""
    docstring = node.body[0]
    if ast.get_docstring(node, clean=False) is None or len(node.body) < 2:
        return None
    prompt = _slice(lines, (node.lineno, node.col_offset), _end(docstring))
    body = _slice(lines, _end(docstring), _end(node))
    prompt, body = (_to_margin(text, node.col_offset) for text in (prompt, body))
    if not body.startswith("\n"):
        return None  # code or a comment goes on behind the docstring
    return (prompt, body) if _is_same_code(prompt + body, node) else None


def _end(node: ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None  # true of every parsed statement
    return node.end_lineno, node.end_col_offset


def _slice(lines: list[bytes], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Returns the text between two places (line from 1, byte column)."""
    (first, column), (last, last_column) = start, end
    chosen = lines[first - 1 : last]
    chosen[-1] = chosen[-1][:last_column]
    chosen[0] = chosen[0][column:]
    return b"".join(chosen).decode("utf-8").replace("\r\n", "\n")


def _to_margin(text: str, indent: int) -> str:
    """Removes `indent` columns from every line but the first, which the slice has cut already."""
    head, *rest = text.split("\n")
    return "\n".join([head.rstrip(), *(line[indent:] if not line[:indent].strip() else line for line in rest)])


def _is_same_code(text: str, node: ast.AST) -> bool:
    """Whether `text` parses to the function it was cut from: moving it may have changed a string, or broken it."""
    try:
        moved = ast.parse(text).body
    except SyntaxError:
        return False
    return len(moved) == 1 and _without_docstring(moved[0]) == _without_docstring(node)


def _without_docstring(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return [ast.dump(node.args), *(ast.dump(statement) for statement in node.body[1:])]
