"""Large messages as one block of bytes: a table of lengths, then the parts, each aligned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hardpoint.errors import EncodingError
from hardpoint.rpc.shared_memory.layout import ALIGN

Part = bytes | memoryview
ANNOUNCED = 1 << 21
"""Copying so much takes about as long as a reader takes to wake up: 0.1 to 0.2 ms."""


class Image:
    """How ``parts`` lie in a block; computed by the writer."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.places: list[int] = []
        at = _aligned(8 * len(parts))
        for part in parts:
            self.places.append(at)
            at += _aligned(len(part))
        self.size = at

    def table(self) -> bytes:
        """Return the table of lengths with which the block begins."""
        return b"".join(len(part).to_bytes(8, "little") for part in self.parts)

    def write(self, target: memoryview, announce: Callable[[], None]) -> None:
        """Copy the parts, once, into ``target``; call ``announce()`` shortly before that is done:
        when there are ANNOUNCED bytes of the last part to copy, or fewer.
        """
        table = self.table()
        target[: len(table)] = table
        last = len(self.parts) - 1
        for number, (part, at) in enumerate(zip(self.parts, self.places, strict=True)):
            early = 0
            if number == last:
                early = max(0, len(part) - ANNOUNCED)
                if early:
                    target[at : at + early] = memoryview(part)[:early]
                announce()
            target[at + early : at + len(part)] = memoryview(part)[early:]

    def pieces(self, most: int) -> Iterator[Part]:
        """Yield the block in order, as pieces of at most ``most`` bytes, copying only the table."""
        at = 0
        for part, place in zip((self.table(), *self.parts), (0, *self.places), strict=True):
            if place > at:
                yield bytes(place - at)
            view = memoryview(part)
            for begin in range(0, len(view), most):
                yield view[begin : begin + most]
            at = place + len(view)
        if self.size > at:
            yield bytes(self.size - at)


def parts_of(block: memoryview, count: int) -> list[memoryview]:
    """Return views of the parts of an image; raise EncodingError if its table cannot be true."""
    at = _aligned(8 * count)
    if not 1 <= count <= len(block) // 8 or at > len(block):
        raise EncodingError(f"a message of {len(block)} bytes cannot have {count} parts")
    lengths = block[: 8 * count].cast("Q").tolist()
    parts = []
    for length in lengths:
        if length > len(block) - at:
            raise EncodingError("a message's table of lengths leads out of it")
        parts.append(block[at : at + length])
        at += _aligned(length)
    return parts


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
