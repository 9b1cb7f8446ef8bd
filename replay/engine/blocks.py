"""The KV pool: which blocks are free, which hold a cached prefix, and which a request may take.

The memory of the attention cache is cut into blocks of `block_size` tokens. Block 0 is reserved, so a pool of
`num_gpu_blocks` has one less to give. A free block may still hold the KV of a finished prefix; such a block is taken
last, oldest first:

    free list:  [unhashed, latest freed first] ... [hashed, least recently freed first]
                 ^ next to be given                                                 ^ last to be given

A block gets its prefix key when it is full *at allocation time*, before the model ran: a request admitted later in the
same step already hits it. A key stays until the block is given to someone else. Several blocks can hold the same key;
a look-up finds the one that got it first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class BlockPool:
    """Blocks of one engine with their reference counts, their free list and the prefix keys they hold.

    Args:
        num_blocks: all blocks, the reserved one included.
        prefix_caching: whether freed blocks keep their keys.
    """

    def __init__(self, num_blocks: int, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.references = [0] * num_blocks
        self.key_of: list[Hashable | None] = [None] * num_blocks
        self._holders: dict[Hashable, list[int]] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1; cached but unreferenced blocks count as free."""
        return 1.0 - len(self.free) / max(1, self.num_blocks - 1)

    def holder(self, key: Hashable) -> int | None:
        """The block that holds the prefix `key`, or None."""
        holders = self._holders.get(key)
        return holders[0] if holders else None

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` lie in the free list: each costs one free block when it is taken."""
        references = self.references
        return sum(1 for block in blocks if references[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Take cached blocks once more; those in the free list leave it."""
        for block in blocks:
            if self.references[block] == 0:
                del self.free[block]
            self.references[block] += 1

    def take(self, count: int) -> list[int]:
        """The next `count` blocks of the free list, emptied of what they cached."""
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self._forget(block)
            self.references[block] = 1
            taken.append(block)
        return taken

    def hold(self, block: int, key: Hashable) -> None:
        """Register a full block under its prefix key."""
        self.key_of[block] = key
        self._holders.setdefault(key, []).append(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free the blocks of one request, listed from the first to the last: its tail is the next to be overwritten."""
        front: list[int] = []
        back: list[int] = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                (front if self.key_of[block] is None else back).append(block)
        for block in reversed(front):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
        for block in back:
            self.free[block] = None

    def forget_all(self) -> None:
        """Drop every cached prefix that nobody uses (the server's reset of its prefix cache)."""
        for block in list(self.free):
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self.key_of[block]
        if key is None:
            return
        holders = self._holders[key]
        holders.remove(block)
        if not holders:
            del self._holders[key]
        self.key_of[block] = None
