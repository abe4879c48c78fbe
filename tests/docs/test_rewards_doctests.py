"""The worked numbers of the pages on rewards are run as doctests."""

import doctest
import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["rewards.md", "conventions.md"])
def test_worked_numbers(page):
    text = re.sub(r"^```.*$", "", (DOCS / page).read_text(), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {"torch": torch}, page, page, 0)
    report: list[str] = []
    runner = doctest.DocTestRunner()
    result = runner.run(examples, out=report.append)
    assert result.attempted > 5
    assert result.failed == 0, "".join(report)
