"""The writing side of a ring: one process, one thread at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hardpoint.errors import CallTimeoutError
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.codec import LARGE_BYTES
from hardpoint.rpc.shared_memory.bell import Event
from hardpoint.rpc.shared_memory.images import Image, Part
from hardpoint.rpc.shared_memory.inline import HotPath, hot_path
from hardpoint.rpc.shared_memory.layout import (
    CLOSED,
    CONTINUED,
    FRAGMENT,
    FRAME,
    HEAD,
    PAD,
    SLAB,
    SLABBED,
    STREAM,
    WRITER_CPU,
    WRITER_WAITS,
    RingLayout,
)
from hardpoint.rpc.shared_memory.memory import Fence, Memory
from hardpoint.rpc.shared_memory.slabs import Slabs

_HEADER = FRAME.size
_ROUND = _HEADER + 7
_WAIT_S = 0.02
"""Longest sleep of a writer that has no room: readers look for it without a fence."""


class RingWriter:
    """Writes messages that every reader gets, in order.

    Small ones lie in the ring; large ones in the arena, copied once; those for which the arena has
    no room stream through the ring in fragments. ``room`` is the event that readers ring for space;
    ``wake`` wakes readers that sleep, between fragments and while something large is being copied:
    they are awake when it is in place; ``control`` are the words with the flag
    CLOSED, if they are not this ring's own. ``inline`` does what is done for every small message.
    """

    def __init__(
        self,
        memory: Memory,
        layout: RingLayout,
        room: Event,
        spin_s: float,
        wake: Callable[[], None],
        control: memoryview | None = None,
        hot: HotPath | None = None,
    ) -> None:
        self._wake = wake
        self._control = memory.words if control is None else control
        self._memory = memory
        self._layout = layout
        self._room = room
        self._spin_s = spin_s
        self._map = memory.map
        self._words = memory.words
        self._pack = FRAME.pack_into
        self._ring_at = layout.ring_at
        self._capacity = layout.capacity
        self._mask = layout.capacity - 1
        self._largest = layout.capacity // 4
        self._fence = Fence()
        self.hasty = False
        """Whether a message that has no room at once is given up."""
        self._slabs = Slabs(memory, layout)
        self.inline = (hot or hot_path()).InlineWriter(
            memory.map,
            layout.ring_at,
            layout.capacity,
            layout.sleeps(0),
            layout.readers,
            LARGE_BYTES,
        )

    def put(
        self,
        kind: int,
        call_id: int,
        generation: int,
        rank: int,
        name: bytes = b"",
        data: Part = b"",
        buffers: Sequence[memoryview] = (),
        deadline: float | None = None,
    ) -> None:
        """Write one message. Returns when it is visible; waking the readers is the caller's.

        Raises CallTimeoutError if there was no room by ``deadline`` (monotonic s), and
        ChannelClosedError. A fence is passed once it is visible.
        """
        put = self.inline.put
        if not buffers and put(kind, call_id, generation, rank, name, data):
            return
        length = (len(name) + len(data) + _ROUND) & -8
        if buffers or length > self._largest:
            ids = (kind, call_id, generation, rank)
            self._put_large(ids, name, Image([data, *buffers]), deadline)
            return
        self._claim(length, deadline)
        if not put(kind, call_id, generation, rank, name, data):
            raise ChannelClosedError(f"a message of {length} bytes has no place in this channel")

    def tidy(self) -> None:
        """Give memory back that large messages have not needed for some time."""
        self._slabs.tidy(time.monotonic())

    def release(self) -> None:
        """Give the memory back; nothing can be written then. Idempotent."""
        self.inline.release()

    def _publish(self, head: int) -> None:
        """Show the readers what was written up to ``head``."""
        self._words[WRITER_CPU] = 0
        self.inline.head = self._words[HEAD] = head
        self._fence()

    def _put_large(
        self, ids: tuple[int, int, int, int], name: bytes, image: Image, deadline: float | None
    ) -> None:
        slab = self._slabs.take(image.size)
        if slab is None:
            self._stream(ids, name, image, deadline)
            return
        size = SLAB.size + len(name)
        length = (size + _ROUND) & -8
        try:
            image.write(self._memory.bytes[slab.offset : slab.offset + image.size], self._wake)
            head = self._claim(length, deadline)
        except BaseException:
            self._slabs.give_back(slab)
            raise
        kind, call_id, generation, rank = ids
        at = self._ring_at + (head & self._mask)
        self._pack(self._map, at, size, SLABBED, kind, len(name), call_id, generation, rank)
        where = (slab.offset, image.size, slab.use, slab.index, len(image.parts))
        SLAB.pack_into(self._map, at + _HEADER, *where)
        at += _HEADER + SLAB.size
        self._map[at : at + len(name)] = name
        self._publish(head + length)

    def _stream(
        self, ids: tuple[int, int, int, int], name: bytes, image: Image, deadline: float | None
    ) -> None:
        """Send an image in fragments. Who reads the first one of another message drops this one."""
        kind, call_id, generation, rank = ids
        for piece in image.pieces(self._largest - _ROUND - STREAM.size - len(name)):
            size = STREAM.size + len(name) + len(piece)
            length = (size + _ROUND) & -8
            head = self._claim(length, deadline)
            at = self._ring_at + (head & self._mask)
            self._pack(self._map, at, size, FRAGMENT, kind, len(name), call_id, generation, rank)
            at += _HEADER
            end = at + size
            STREAM.pack_into(self._map, at, image.size, len(image.parts))
            at += STREAM.size
            self._map[at : at + len(name)] = name
            self._map[at + len(name) : end] = piece
            self._publish(head + length)
            self._wake()
            kind, name = CONTINUED, b""

    def _claim(self, length: int, deadline: float | None) -> int:
        """Return the position of ``length`` contiguous free bytes; what is left before the ring's
        end is padded.
        """
        self.tidy()
        inline = self.inline
        head = inline.head
        rest = self._capacity - (head & self._mask)
        needed = length if length <= rest else rest + length
        if head + needed > inline.limit:
            self._make_room(head + needed, deadline)
        if length > rest:
            at = self._ring_at + (head & self._mask)
            self._map[at : at + 8] = bytes((0, 0, 0, 0, PAD, 0, 0, 0))
            head += rest
        boundary = head + self._capacity - (head & self._mask)
        inline.head = head
        inline.edge = min(inline.limit, boundary, head + self._largest)
        return head

    def _make_room(self, goal: int, deadline: float | None) -> None:
        """Wait until the slowest reader has read so far that there is room up to ``goal``."""
        layout, words = self._layout, self._words
        tails = [layout.tail(reader) for reader in range(layout.readers)]
        spin_until = time.monotonic() + self._spin_s
        while True:
            if self._control[CLOSED]:
                raise ChannelClosedError("the channel was closed while a message had no room")
            self.inline.limit = limit = min(words[tail] for tail in tails) + layout.capacity
            if limit >= goal:
                words[WRITER_WAITS] = 0
                return
            if self.hasty:
                raise ChannelClosedError("a message has no room, and the readers are given up")
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                slow = [r for r, tail in enumerate(tails) if words[tail] + layout.capacity < goal]
                raise CallTimeoutError(
                    f"a message could not be sent in time: readers {slow} leave no room for it"
                )
            if now < spin_until:
                os.sched_yield()
                continue
            words[WRITER_WAITS] = 1
            self._fence()
            if min(words[tail] for tail in tails) + layout.capacity < goal:
                left = _WAIT_S if deadline is None else min(_WAIT_S, deadline - now)
                self._room.sleep(left)
