"""The reading side of a ring: one process, one thread at a time."""

from __future__ import annotations

from hardpoint.errors import EncodingError
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.shared_memory.bell import Event
from hardpoint.rpc.shared_memory.images import parts_of
from hardpoint.rpc.shared_memory.inline import HotPath, Message, hot_path
from hardpoint.rpc.shared_memory.layout import (
    CONTINUED,
    FRAGMENT,
    FRAME,
    HEAD,
    PAD,
    SLAB,
    SLABBED,
    STREAM,
    WRITER_WAITS,
    RingLayout,
)
from hardpoint.rpc.shared_memory.memory import Memory
from hardpoint.rpc.shared_memory.windows import Windows

_HEADER = FRAME.size
_ROUND = _HEADER + 7


class RingReader:
    """Reads, as reader number ``reader``, what the writer wrote.

    There is something to take while ``words[HEAD]`` is not ``inline.tail``. ``name`` is the
    owner's; ``inline`` takes what every small message is.

    A frame that cannot be true raises ChannelClosedError: the memory is not to be trusted then.
    """

    def __init__(
        self,
        memory: Memory,
        layout: RingLayout,
        reader: int,
        room: Event,
        *,
        name: int = 0,
        hot: HotPath | None = None,
        crowd: str | None = None,
    ) -> None:
        self.name = name
        self._layout = layout
        self._room = room
        self._map = memory.map
        self._memory = memory
        self.words = memory.words
        self._unpack = FRAME.unpack_from
        self._ring_at = layout.ring_at
        self._mask = layout.capacity - 1
        self._tail_word = layout.tail(reader)
        self.inline = (hot or hot_path()).InlineReader(
            memory.map,
            layout.ring_at,
            layout.capacity,
            self._tail_word,
            self._tell_room,
            crowd,
            layout.readers + 1,
        )
        self._windows = Windows(memory, layout, reader, self._tell_room)
        self._assembly: _Assembly | None = None

    def ready(self) -> bool:
        """Whether a frame is here."""
        return self.words[HEAD] != self.inline.tail

    def take(self) -> Message | None:
        """Return the next message, or None if none is complete; never waits."""
        message: Message | None = self.inline.take()
        if message is None and self.words[HEAD] < self.inline.tail:
            raise _untrue("less than was read")
        return self._take_odd() if message is NotImplemented else message

    def close(self) -> None:
        """Stop telling the writer about views that are dropped later."""
        self._windows.close()
        self.inline.release()

    def _take_odd(self) -> Message | None:
        """Take frames that are not in line until they make a message, or one in line follows."""
        while (available := self.words[HEAD] - self.inline.tail) > 0:
            message: Message | None = self.inline.take()
            if message is not NotImplemented:
                return message
            at = self._ring_at + (self.inline.tail & self._mask)
            header = self._unpack(self._map, at)
            message = self._take_other(available, at, header)
            if message is not None:
                return message
        return None

    def _take_other(self, available: int, at: int, header: tuple[int, ...]) -> Message | None:
        """Take a frame that is not in line; return the message if it completes one."""
        size, storage, kind, named, call_id, generation, rank = header
        capacity = self._mask + 1
        to_end = capacity - (self.inline.tail & self._mask)
        length = to_end if storage == PAD else (size + _ROUND) & -8
        if not length <= available <= capacity or length > to_end:
            raise _untrue(f"a frame of {length} bytes, of which {available} were written")
        message = None
        if storage != PAD:
            head = (kind, call_id, generation, rank)
            at += _HEADER
            message = self._take_large(at, at + size, storage, head, named)
        self.inline.tail += length
        self.words[self._tail_word] = self.inline.tail
        if self.words[WRITER_WAITS]:
            self._tell_room()
        return message

    def _take_large(
        self, at: int, end: int, storage: int, head: tuple[int, int, int, int], named: int
    ) -> Message | None:
        start = at + (SLAB.size if storage == SLABBED else STREAM.size)
        if storage not in (SLABBED, FRAGMENT) or start + named > end:
            raise _untrue(f"a frame of storage {storage}, {end - at} bytes long")
        name = self._map[start : start + named]
        try:
            if storage == SLABBED:
                offset, size, use, slot, count = SLAB.unpack_from(self._map, at)
                pieces = parts_of(self._windows.open(slot, use, offset, size), count)
                self._assembly = None
            else:
                total, count = STREAM.unpack_from(self._map, at)
                if head[0] != CONTINUED:
                    self._assembly = _Assembly(head, name, count, total)
                complete = self._add(start + named, end)
                if complete is None:
                    return None
                head, name, pieces = complete.head, complete.name, complete.pieces()
        except EncodingError as error:
            raise _untrue(str(error)) from error
        return (*head, name, pieces[0], pieces[1:])

    def _add(self, at: int, end: int) -> _Assembly | None:
        """Add one piece; return the message if that was the last."""
        assembly = self._assembly
        if assembly is None:
            raise _untrue("a fragment without its beginning")
        if not assembly.add(self._memory.bytes[at:end]):
            return None
        self._assembly = None
        return assembly

    def _tell_room(self) -> None:
        self.words[WRITER_WAITS] = 0
        self._room.wake()


class _Assembly:
    """A message of which fragments have come.

    One for which there is no memory is counted only: without its bytes, it fails its own call.
    """

    def __init__(self, head: tuple[int, int, int, int], name: bytes, parts: int, size: int) -> None:
        self.head = head
        self.name = name
        self._parts = parts
        self._size = size
        self._at = 0
        try:
            self._view: memoryview | None = memoryview(bytearray(size))
        except (MemoryError, OverflowError):
            self._view = None

    def add(self, piece: memoryview) -> bool:
        """Take a piece; return whether it was the last."""
        end = self._at + len(piece)
        if end > self._size:
            raise _untrue("fragments that are larger than their message")
        if self._view is not None:
            self._view[self._at : end] = piece
        self._at = end
        return end == self._size

    def pieces(self) -> list[memoryview]:
        """Return the parts, read-only."""
        if self._view is None:
            return [memoryview(b"")]
        return parts_of(self._view.toreadonly(), self._parts)


def _untrue(what: str) -> ChannelClosedError:
    return ChannelClosedError(f"the channel's memory holds {what}; it is not used any more")
