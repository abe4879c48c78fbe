"""Seeds that depend on what is sampled, not on when or where: a run repeats whatever the number of engines."""

from __future__ import annotations

import hashlib

SEED_BITS = 48  # leaves room for `seed + sample` in every generator's integer type


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2**48) from the run seed, phase, step, example id, anchor, ...

    The same parts always give the same seed; parts are kept apart, so ("a", "bc") and ("ab", "c") differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = repr(part).encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") % (1 << SEED_BITS)


def completion_seed(request_seed: int, anchor: int, sample: int) -> int:
    """Seed of one completion: requests are apart by hash, the samples of one anchor by consecutive numbers."""
    return derive_seed(request_seed, anchor) + sample
