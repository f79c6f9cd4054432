"""The KV blocks of one engine: who holds which, and which can be handed out next.

Pure bookkeeping in the driver; the memory itself is the workers'. Ids below ``reserved`` (the null
block 0 among them) are never handed out. A held block has a reference count of one or more. A free
block is one of three: *kept* (its contents have a name in the prefix cache and may be shared
again), *spare* (used before, contents worthless) or *fresh* (never used). Blocks are handed out in
the order spare, fresh, kept from the least recently used, so that little memory is touched and
cached contents live longest. Every operation is O(1) for each block, whatever the size of the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from hardpoint.errors import HardpointError


class BlockAccountError(HardpointError):
    """The driver's accounts of KV blocks contradict themselves: a defect of the engine.

    What to do: report it, with the settings; start a new engine.
    """


class BlockPool:
    """Counts references to ``num_blocks`` blocks and hands out those that nobody holds.

    ``on_recycle(block)`` is called when a kept block is handed out for new contents. Not
    thread-safe: the engine core holds its lock.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        reserved: int = 1,
        on_recycle: Callable[[int], None] | None = None,
    ) -> None:
        if reserved < 1 or num_blocks <= reserved:
            raise BlockAccountError(
                f"{num_blocks} KV blocks with {reserved} reserved leave none to use"
            )
        self.num_blocks = num_blocks
        self.reserved = reserved
        self.on_recycle = on_recycle
        self._references: dict[int, int] = {}
        self._spare: list[int] = []
        self._next_fresh = reserved
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._named: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - self.reserved

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._spare) + self.num_blocks - self._next_fresh + len(self._kept)

    @property
    def references(self) -> Mapping[int, int]:
        """Block id -> how many requests hold it, for the held ones."""
        return MappingProxyType(self._references)

    def is_held(self, block: int) -> bool:
        """Whether some request holds ``block``."""
        return block in self._references

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, each with one reference. The caller has looked at
        ``num_free``.
        """
        if count > self.num_free:
            raise BlockAccountError(f"{count} KV blocks wanted, {self.num_free} are free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._spare:
            block = self._spare.pop()
        elif self._next_fresh < self.num_blocks:
            block = self._next_fresh
            self._next_fresh += 1
        else:
            block, _ = self._kept.popitem(last=False)
            self._named.discard(block)
            if self.on_recycle is not None:
                self.on_recycle(block)
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, held or kept."""
        for block in blocks:
            if block in self._references:
                self._references[block] += 1
            elif block in self._kept:
                del self._kept[block]
                self._references[block] = 1
            else:
                raise BlockAccountError(f"KV block {block} has no contents to share")

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each; the first block given is the first to be recycled later."""
        for block in blocks:
            count = self._references.get(block, 0)
            if count > 1:
                self._references[block] = count - 1
            elif count == 1:
                del self._references[block]
                if block in self._named:
                    self._kept[block] = None
                else:
                    self._spare.append(block)
            else:
                raise BlockAccountError(f"KV block {block} is released but nobody holds it")

    def name(self, block: int) -> None:
        """Say that the contents of a held block can be found again: it is kept when free."""
        if block not in self._references:
            raise BlockAccountError(f"KV block {block} is named but nobody holds it")
        self._named.add(block)

    def forget_names(self) -> None:
        """Say that no contents can be found again: all kept blocks become spare."""
        self._named.clear()
        self._spare.extend(self._kept)
        self._kept.clear()
