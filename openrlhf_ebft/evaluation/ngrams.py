"""How much of a ground truth's wording a completion shares, counted on token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def ngram_overlap(completion: Sequence[int], truth: Sequence[int], order: int) -> float:
    """F1 of the two multisets of n-grams, in [0, 1]: 2 * shared / (n-grams of one + n-grams of the other).

    Counts are clipped, so a repeated phrase counts as often as the other side has it. Where neither side has an
    n-gram, the value is 1 for equal sequences and 0 for others.

    Raises:
        ValueError: order below 1.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1, got {order}")
    left, right = _ngrams(completion, order), _ngrams(truth, order)
    total = left.total() + right.total()
    if total == 0:
        return float(list(completion) == list(truth))
    return 2 * (left & right).total() / total


def _ngrams(tokens: Sequence[int], order: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))
