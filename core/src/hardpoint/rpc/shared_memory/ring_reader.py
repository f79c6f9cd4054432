"""The reading side of a ring: one process, one thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hardpoint.errors import EncodingError
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.shared_memory.bell import Event
from hardpoint.rpc.shared_memory.images import Part, parts_of
from hardpoint.rpc.shared_memory.layout import (
    CONTINUED,
    FRAGMENT,
    FRAME,
    HEAD,
    INLINE,
    LONGEST_NAME,
    PAD,
    SLAB,
    SLABBED,
    WRITER_WAITS,
    RingLayout,
)
from hardpoint.rpc.shared_memory.memory import Memory
from hardpoint.rpc.shared_memory.windows import Windows

_T = TypeVar("_T")
_HEADER = FRAME.size
Made = Callable[[int, bytes, int, int, int, Part, Sequence[memoryview]], _T]
"""(kind, name, call id, generation, rank, data, buffers) -> a message."""


class RingReader(Generic[_T]):
    """Reads, as reader number ``reader``, what the writer wrote; ``make`` builds each message.

    A frame that cannot be true raises ChannelClosedError: the memory is not to be trusted then.
    """

    def __init__(
        self, memory: Memory, layout: RingLayout, reader: int, room: Event, make: Made[_T]
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._room = room
        self._make = make
        self._bytes = memory.bytes
        self._words = memory.words
        self._mask = layout.capacity - 1
        self._tail_word = layout.tail(reader)
        self._tail = self._words[self._tail_word]
        self._windows = Windows(memory, layout, reader, self._tell_room)
        self._assembly: _Assembly | None = None

    def ready(self) -> bool:
        """Whether a frame is here."""
        return self._words[HEAD] != self._tail

    def take(self) -> _T | None:
        """Return the next message, or None if none is complete; never waits."""
        while (available := self._words[HEAD] - self._tail) > 0:
            at = self._layout.ring_at + (self._tail & self._mask)
            if self._bytes[at + 4] == PAD:
                self._advance(int.from_bytes(self._bytes[at : at + 4], "little"), available)
                continue
            length, storage, kind, named, call_id, generation, rank, parts, size, use = (
                FRAME.unpack_from(self._bytes, at)
            )
            if length > available or length < _HEADER + named or named > LONGEST_NAME:
                raise self._untrue(f"a frame of {length} bytes, of which {available} were written")
            start = at + _HEADER
            if storage == INLINE:
                if length < _HEADER + named + size:
                    raise self._untrue(f"a frame of {length} bytes with {size} bytes of payload")
                end = start + named
                name, data = bytes(self._bytes[start:end]), bytes(self._bytes[end : end + size])
                self._assembly = None
                self._advance(length, available)
                return self._make(kind, name, call_id, generation, rank, data, ())
            head = (kind, call_id, generation, rank)
            if storage == SLABBED:
                return self._take_slab(at, length, available, named, head, parts, (size, use))
            if storage != FRAGMENT or length < _HEADER + named + size:
                raise self._untrue(f"a frame of storage {storage}")
            message = self._take_fragment(start, named, head, parts, size, use)
            self._advance(length, available)
            if message is not None:
                return message
        return None

    def close(self) -> None:
        """Stop telling the writer about views that are dropped later."""
        self._windows.close()

    def _take_slab(
        self,
        at: int,
        length: int,
        available: int,
        named: int,
        head: tuple[int, int, int, int],
        parts: int,
        slot: tuple[int, int],
    ) -> _T:
        offset, size = SLAB.unpack_from(self._bytes, at + _HEADER)
        start = at + _HEADER + SLAB.size
        name = bytes(self._bytes[start : start + named])
        kind, *ids = head
        try:
            pieces = parts_of(self._windows.open(*slot, offset, size), parts)
        except EncodingError as error:
            raise self._untrue(str(error)) from error
        self._assembly = None
        self._advance(length, available)
        return self._make(kind, name, ids[0], ids[1], ids[2], pieces[0], pieces[1:])

    def _take_fragment(
        self, start: int, named: int, head: tuple[int, int, int, int], parts: int, size: int,
        total: int,
    ) -> _T | None:  # fmt: skip
        kind = head[0]
        if kind != CONTINUED:
            name = bytes(self._bytes[start : start + named])
            self._assembly = _Assembly(head, name, parts, total)
        assembly = self._assembly
        if assembly is None:
            raise self._untrue("a fragment without its beginning")
        begin = start + named
        if not assembly.add(self._bytes[begin : begin + size]):
            return None
        self._assembly = None
        kind, *ids = assembly.head
        pieces = assembly.pieces()
        return self._make(kind, assembly.name, ids[0], ids[1], ids[2], pieces[0], pieces[1:])

    def _advance(self, length: int, available: int) -> None:
        if length % 8 or not 8 <= length <= available:
            raise self._untrue(f"a frame of {length} bytes, of which {available} were written")
        self._tail += length
        self._words[self._tail_word] = self._tail
        if self._words[WRITER_WAITS]:
            self._tell_room()

    def _tell_room(self) -> None:
        self._words[WRITER_WAITS] = 0
        self._room.wake()

    def _untrue(self, what: str) -> ChannelClosedError:
        return ChannelClosedError(f"the channel's memory holds {what}; it is not used any more")


class _Assembly:
    """A message of which fragments have come."""

    def __init__(self, head: tuple[int, int, int, int], name: bytes, parts: int, size: int) -> None:
        self.head = head
        self.name = name
        self._parts = parts
        self._block = bytearray(size)
        self._view = memoryview(self._block)
        self._at = 0

    def add(self, piece: memoryview) -> bool:
        """Take a piece; return whether it was the last."""
        end = self._at + len(piece)
        if end > len(self._block):
            raise ChannelClosedError("the fragments of a message are larger than the whole")
        self._view[self._at : end] = piece
        self._at = end
        return end == len(self._block)

    def pieces(self) -> list[memoryview]:
        """Return the parts, read-only."""
        return parts_of(self._view.toreadonly(), self._parts)
