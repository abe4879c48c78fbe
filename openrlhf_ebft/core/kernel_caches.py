"""Bounds for the compiled kernels that oneDNN keeps; needs no torch, since a process is told before it starts."""

from __future__ import annotations


def kept_kernels(count: int) -> dict[str, str]:
    """Environment of a process in which oneDNN keeps at most `count` compiled kernels in each of its two caches.

    By default it keeps 1,024, one for each shape that it has met: hundreds of MiB where almost every step has new ones.
    """
    return dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(count))
