"""Rewards that can be checked, for reward.function: a baseline beside the energy-based reward, or a part added to it.

    openrlhf-ebft train examples/quickstart.yaml --name parses \
        --reward.function examples/verifiable_rewards.py:parses --reward.alignment_coef 0 --reward.diversity_coef 0
"""

import ast
import re
from typing import Any


def exact_match(prompts: list[str], completions: list[str], ground_truths: list[str]) -> list[float]:
    """1 for a completion that is its ground truth, apart from white space around it, else 0."""
    return [float(c.strip() == g.strip()) for c, g in zip(completions, ground_truths, strict=True)]


def parses(prompts: list[str], completions: list[str], ground_truths: list[str]) -> list[float]:
    """1 for a completion that makes a valid Python program together with its prompt, else 0."""
    return [float(_is_program(prompt + completion)) for prompt, completion in zip(prompts, completions, strict=True)]


def last_number(prompts: list[str], completions: list[str], ground_truths: list[str], answer: list[Any]) -> list[float]:
    """1 where the last number of a completion is the row's `answer` (a column of the data), else 0."""
    return [float(_last_number(text) == _number(value)) for text, value in zip(completions, answer, strict=True)]


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return _number(found[-1]) if found else None


def _number(value: Any) -> float:
    """Of a number, or of text such as 1,250."""
    return float(str(value).replace(",", ""))


def _is_program(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):  # ValueError: a null character
        return False
    return True
