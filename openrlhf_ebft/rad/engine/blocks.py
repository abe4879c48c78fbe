"""Which blocks of a prefix cache belong to whom: free list, sharing of equal prefixes, least recently used first.

A block holds the entries of BLOCK consecutive tokens of a prefix. A full block is known by all tokens up to its end,
so two requests with the same beginning share it, and a request that comes back (resumed, or sent again) finds it as
long as nobody else needed the room. Plain Python, no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

BLOCK = 16
# The node before the first block of every prefix.
ROOT = 0


class BlockPool:
    """Blocks 0 .. size-1; each is in use (by one or several owners), kept for reuse, or free.

    Known prefixes form a tree: a node is the beginning of a prefix up to the end of a full block. Node numbers are
    never used twice, so a node whose parent was forgotten cannot be found by other tokens.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.generation = 0
        self._numbers = count(ROOT + 1)
        self.forget_all()

    def forget_all(self) -> None:
        """Back to the start: every block is free and nothing is known; blocks of an older generation are void."""
        self.generation += 1
        self._free = list(range(self.size - 1, -1, -1))
        self._users = [0] * self.size
        self._nodes: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (parent, tokens) -> (node, block)
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its key
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused blocks with known content, oldest first

    @property
    def used(self) -> int:
        """Blocks that somebody uses."""
        return self.size - self.available

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._kept)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Takes the blocks of the longest known beginning of `tokens`; returns them and their last node."""
        found: list[int] = []
        node = ROOT
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            known = self._nodes.get((node, tuple(tokens[start : start + BLOCK])))
            if known is None:
                break
            node, block = known
            found.append(block)
            self._users[block] += 1
            self._kept.pop(block, None)
        return found, node

    def allocate(self, number: int) -> list[int] | None:
        """Takes `number` blocks, forgetting the least recently used content; None when there are not so many."""
        if number > self.available:
            return None
        return [self._take_one() for _ in range(number)]

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._nodes[self._key_of.pop(block)]
        self._users[block] = 1
        return block

    def register(self, block: int, parent: int, tokens: Sequence[int]) -> int:
        """Makes a full block known: `tokens` are its own, `parent` the node before it. Returns its node.

        Where an equal block is known already, that one stays the known one.
        """
        key = (parent, tuple(tokens))
        known = self._nodes.get(key)
        if known is not None:
            return known[0]
        node = next(self._numbers)
        self._nodes[key] = (node, block)
        self._key_of[block] = key
        return node

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back. Known ones are kept for reuse, the end of a prefix being forgotten before its start."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._free.append(block)
