"""Pairs of the standard library are the functions' own code, cut where the docstring ends."""

import ast
import json

import pytest

from openrlhf_ebft.data.stdlib_pairs import stdlib_pairs, write_stdlib_pairs

SOURCE = '''
"""Module."""

def plain(a, b=1):
    """Adds, with an é."""
    total = a + b  # sum

    return total

def no_docstring(x):
    return x

def only_docstring():
    """Nothing."""

def comment_behind():
    """Doc."""  # noqa
    return 1

def one_line(): """Doc."""; return 1

class Outer:
    @property
    def method(self):
        """Doc
        of two lines.
        """
        def inner():
            """Inner."""
            return 2
        return inner

    if True:
        async def guarded(self):
            "One quote."
            text = """
            kept
"""
            return text

def plain_again(a, b=1):
    pass
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "b.py").write_text('def f():\n\t"""Tabs."""\n\treturn 1\n')
    (tmp_path / "copy.py").write_text('def f():\n\t"""Tabs."""\n\treturn 1\n')
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b'# -*- coding: latin-1 -*-\ndef f():\n    "\xe9"\n    return 1\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text('def f():\n    """In a test."""\n    return 1\n')
    return tmp_path


def test_pairs_of_a_folder(root):
    pairs = list(stdlib_pairs(root))
    assert [pair["source"] for pair in pairs] == ["b.f", "pkg.plain", "pkg.Outer.method"]
    assert pairs[0]["prompt"] == 'def f():\n\t"""Tabs."""'
    assert pairs[0]["ground_truth"] == "\n\treturn 1"
    assert pairs[1]["prompt"] == 'def plain(a, b=1):\n    """Adds, with an é."""'
    assert pairs[1]["ground_truth"] == "\n    total = a + b  # sum\n\n    return total"
    assert pairs[2]["prompt"] == 'def method(self):\n    """Doc\n    of two lines.\n    """'
    assert pairs[2]["ground_truth"] == '\n    def inner():\n        """Inner."""\n        return 2\n    return inner'


def test_code_that_moving_would_change_is_left_out(root):
    """The string of `guarded` holds its own indent: at the left margin it would be another string."""
    assert all("guarded" not in pair["source"] for pair in stdlib_pairs(root))


def test_the_real_library(tmp_path):
    count = write_stdlib_pairs(tmp_path / "out" / "pairs.jsonl")
    text = (tmp_path / "out" / "pairs.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == count > 1000
    assert len({(row["prompt"], row["ground_truth"]) for row in rows}) == count
    assert [row["source"] for row in rows if row["source"] == "textwrap.dedent"] == ["textwrap.dedent"]
    for row in rows[:: count // 100]:
        (function,) = ast.parse(row["prompt"] + row["ground_truth"]).body
        assert row["source"].endswith(f".{function.name}")
        assert ast.get_docstring(function, clean=False) is not None
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "pairs.jsonl"]
