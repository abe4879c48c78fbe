"""Numbers to offer where a key must divide by another."""

from __future__ import annotations


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """Returns the multiples of `divisor` next to `value` that are at least `divisor`, below first."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple >= divisor]
