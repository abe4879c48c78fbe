"""The stored prefix of one request in one reward model's cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from openrlhf_ebft.rad.engine.blocks import BLOCK, ROOT, BlockPool


@dataclass
class StoredPrefix:
    """Blocks of a request's prefix, of which the first `covered` tokens have their entries.

    Attributes:
        blocks: in order of position.
        covered: tokens whose entries are stored.
        node: where the full blocks so far stand in the pool's tree of known prefixes.
        known: number of full blocks that the tree has.
        generation: that of the pool when the blocks were taken; in another one they are void.
        step: the scoring step in which this request's candidates went through last.
        places: by candidate of that step, (which of its forwards, place among that forward's candidates).
    """

    blocks: list[int] = field(default_factory=list)
    covered: int = 0
    node: int = ROOT
    known: int = 0
    generation: int = 0
    step: int = -1
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    def release(self, pool: BlockPool) -> None:
        """Gives the blocks back; the prefix starts anew."""
        if self.generation == pool.generation:
            pool.release(self.blocks)
        self.blocks, self.covered, self.node, self.known, self.step = [], 0, ROOT, 0, -1
        self.generation = pool.generation

    def adopt(self, pool: BlockPool, tokens: list[int]) -> None:
        """Takes over what the pool knows of the beginning of `tokens`; only for a prefix that covers nothing.

        Blocks that were reserved for that beginning go back.
        """
        shared, node = pool.match(tokens)
        if not shared:
            return
        pool.release(self.blocks[: len(shared)])
        self.blocks[: len(shared)] = shared
        self.node, self.known, self.covered = node, len(shared), len(shared) * BLOCK

    def reserve(self, pool: BlockPool, tokens: int) -> bool:
        """Makes room for the first `tokens` tokens; False when the pool has none (nothing is changed then)."""
        missing = -(-tokens // BLOCK) - len(self.blocks)
        if missing <= 0:
            return True
        taken = pool.allocate(missing)
        if taken is None:
            return False
        self.blocks += taken
        return True

    def cover(self, pool: BlockPool, tokens: list[int], upto: int) -> None:
        """Notes that entries up to token `upto` are stored or will be by the forward being prepared."""
        self.covered = upto
        while (self.known + 1) * BLOCK <= upto:
            start = self.known * BLOCK
            self.node = pool.register(self.blocks[self.known], self.node, tokens[start : start + BLOCK])
            self.known += 1

    def slots(self, start: int, end: int) -> list[tuple[int, int]]:
        """(block, place) of tokens start .. end-1."""
        return [(self.blocks[token // BLOCK], token % BLOCK) for token in range(start, end)]
