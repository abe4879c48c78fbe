"""How many positions a model has that mean the same in every text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def position_limit(config: Any) -> int | None:
    """Tokens that a model of this (text) configuration reads at most, or None without a limit.

    A model with `longrope` positions reads more, but then turns the keys and queries of ALL tokens otherwise: a token's
    state would depend on how long other sequences of its batch are, and cached keys would not fit new queries. Its
    limit is the length up to which it does not.
    """
    limits = [getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *rope.values()]:  # one for all layers, or one for each kind of layer
        if isinstance(part, Mapping) and part.get("rope_type") == "longrope":
            limits.append(part.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit and limit > 0]  # -1: some models state that they have none
    return min(known) if known else None
