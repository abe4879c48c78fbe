"""What a cached prefix can be reused for: matching the rows of a step with the rows of the step before.

Everything is decided by token content, never by row number or call order: rows may be reordered, repeated, dropped or
rewound, and another prompt may come; what does not match is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class TreeState:
    """Content of the committed slots and of the candidate slots after them. B rows, P slots, K candidates.

    Attributes:
        tokens: [B, L] int64 right-padded, the prefix of each row.
        lengths: [B] int64.
        candidate_ids: [B, K] int64; candidate c lies in slot P + c.
        valid: [B, P] bool, True where a slot holds a token of the row; in order of position.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    candidate_ids: torch.Tensor
    valid: torch.Tensor


@dataclass
class Reuse:
    """Which entries of a state serve the rows of a new step.

    Attributes:
        source: [B] int64, the state's row.
        shared: [B] int64, prefix entries reused.
        candidate: [B] int64, the candidate entry that is the row's next token after all of the source's prefix, or -1.
    """

    source: torch.Tensor
    shared: torch.Tensor
    candidate: torch.Tensor

    @property
    def covered(self) -> torch.Tensor:
        """[B] int64: tokens that need no computation."""
        return self.shared + (self.candidate >= 0).long()

    def continues(self, state: TreeState) -> bool:
        """Whether row i goes on from all of the state's row i, for every i."""
        if self.source.size(0) != state.lengths.size(0):
            return False
        order = torch.arange(self.source.size(0), device=self.source.device)
        return bool(((self.source == order) & (self.shared == state.lengths)).all())

    def without_candidates(self) -> Reuse:
        """The same reuse, prefix entries only."""
        return Reuse(self.source, self.shared, torch.full_like(self.candidate, -1))


def match_rows(state: TreeState, tokens: torch.Tensor, lengths: torch.Tensor) -> Reuse:
    """The best source row of each new row: longest common prefix, then its own row number.

    Args:
        state: the cached content.
        tokens: [B', L'] int64 right-padded prefixes of the step.
        lengths: [B'] int64.
    """
    rows = torch.arange(tokens.size(0), device=tokens.device)
    if tokens.size(0) == state.tokens.size(0):
        shared = _common_prefix(tokens, lengths, state.tokens, state.lengths)
        if bool((shared == state.lengths).all()):  # the ordinary step; spares comparing every row with every other
            return Reuse(rows, shared, _next_candidates(state, rows, shared, tokens, lengths))
    common = _common_prefix(tokens[:, None], lengths[:, None], state.tokens[None], state.lengths[None])  # [B', B]
    own = rows[:, None] == torch.arange(common.size(1), device=tokens.device)[None, :]
    source = (common * 2 + own.long()).argmax(dim=1)
    shared = common[rows, source]
    return Reuse(source, shared, _next_candidates(state, source, shared, tokens, lengths))


def _common_prefix(
    first: torch.Tensor, first_lengths: torch.Tensor, second: torch.Tensor, second_lengths: torch.Tensor
) -> torch.Tensor:
    """Number of equal leading tokens; ids [..., L] and lengths [...] broadcast against each other."""
    width = min(first.size(-1), second.size(-1))
    within = torch.arange(width, device=first.device)
    inside = (within < first_lengths[..., None]) & (within < second_lengths[..., None])
    same = (first[..., :width] == second[..., :width]) & inside
    return same.long().cumprod(dim=-1).sum(dim=-1)


def _next_candidates(
    state: TreeState, source: torch.Tensor, shared: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """[B'] int64: the source's candidate that is the row's next token after all of the source's prefix, or -1."""
    none = torch.full_like(source, -1)
    if tokens.size(1) == 0 or state.candidate_ids.size(1) == 0:
        return none
    longer = (shared == state.lengths[source]) & (lengths > shared)
    following = tokens.gather(1, shared.clamp_max(tokens.size(1) - 1)[:, None])
    hits = (state.candidate_ids[source] == following) & longer[:, None]
    return torch.where(hits.any(dim=1), hits.long().argmax(dim=1), none)


def reused_slots(state: TreeState, reuse: Reuse) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots to keep for each row, right-aligned, and which of them are valid.

    Returns:
        slots [B', W] int64 (0 where not valid) and valid [B', W] bool, W = max of `reuse.covered`.
    """
    covered = reuse.covered
    width = int(covered.max())
    index = torch.arange(width, device=covered.device)[None, :] - (width - covered)[:, None]  # token number, < 0: none
    in_order = (~state.valid).long().argsort(dim=1, stable=True)[reuse.source]  # token number -> slot
    most = in_order.size(1)
    slots = in_order.gather(1, index.clamp(0, most - 1)) if most else torch.zeros_like(index)
    from_candidate = (index == reuse.shared[:, None]) & (reuse.candidate >= 0)[:, None]
    slots = torch.where(from_candidate, state.valid.size(1) + reuse.candidate[:, None], slots)
    valid = index >= 0
    return torch.where(valid, slots, torch.zeros_like(slots)), valid
