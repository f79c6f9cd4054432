"""The writer's book of the arena: which blocks are free, by what the readers say of them."""

from __future__ import annotations

import contextlib
import math
import mmap
import time

from attrs import define

from hardpoint.rpc.shared_memory.layout import SLOTS, RingLayout
from hardpoint.rpc.shared_memory.memory import PAGE, Memory

_SMALLEST = 64 * 1024
KEEP_S = 2.0
"""Seconds after its last use for which a block keeps its memory."""


@define
class Slab:
    """A block of the arena; ``use`` counts the messages that have lain in it, ``used_at`` is when
    the last one was put there (monotonic s), infinity if it has no memory.
    """

    index: int
    offset: int
    capacity: int
    use: int = 0
    used_at: float = math.inf


class Slabs:
    """Hands out blocks. One is free again when every reader has dropped its views of it.

    A block's capacity is a power of two, so that blocks are used again rather than new pages. One
    that is not used for KEEP_S gives its pages back.
    """

    def __init__(self, memory: Memory, layout: RingLayout) -> None:
        self._map = memory.map
        self._words = memory.words
        self._layout = layout
        self._slabs: list[Slab] = []
        self._next = layout.arena_at

    def take(self, size: int) -> Slab | None:
        """Return a block of at least ``size`` bytes, or None if there is none now."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        slab = self._fitting(capacity)
        if slab is not None:
            slab.use += 1
            slab.used_at = time.monotonic()
            return slab
        end = self._layout.arena_at + self._layout.arena
        if self._next + capacity > end or len(self._slabs) == SLOTS:
            if capacity > self._layout.arena or not all(map(self._free, self._slabs)):
                return None
            self._begin_again()
        index = len(self._slabs)
        use = self._last_use(index) + 1
        slab = Slab(index, self._next, capacity, use, time.monotonic())
        self._slabs.append(slab)
        self._next += -(-capacity // PAGE) * PAGE
        return slab

    def give_back(self, slab: Slab) -> None:
        """Take a block back of which no reader was told."""
        slab.use -= 1

    def tidy(self, now: float) -> None:
        """Give back the memory of blocks that nobody has needed since KEEP_S before ``now``
        (monotonic s).
        """
        for slab in self._slabs:
            if now - slab.used_at > KEEP_S and self._free(slab):
                self._release(slab)

    def _release(self, slab: Slab) -> None:
        slab.used_at = math.inf
        with contextlib.suppress(OSError):  # a system that cannot: it is used again then
            self._map.madvise(mmap.MADV_REMOVE, slab.offset, -(-slab.capacity // PAGE) * PAGE)

    def _fitting(self, capacity: int) -> Slab | None:
        for slab in self._slabs:
            if slab.capacity == capacity and self._free(slab):
                return slab
        return None

    def _free(self, slab: Slab) -> bool:
        layout, words = self._layout, self._words
        return all(
            words[layout.released(slab.index, reader)] == slab.use
            for reader in range(layout.readers)
        )

    def _last_use(self, index: int) -> int:
        return max(
            self._words[self._layout.released(index, reader)]
            for reader in range(self._layout.readers)
        )

    def _begin_again(self) -> None:
        """Divide the arena anew: nobody holds any of it."""
        for slab in self._slabs:
            if slab.used_at < math.inf:
                self._release(slab)
        self._slabs.clear()
        self._next = self._layout.arena_at
