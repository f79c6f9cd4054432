"""The writing side of a ring: one process, one thread at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hardpoint.errors import CallTimeoutError
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.shared_memory.bell import Event
from hardpoint.rpc.shared_memory.images import Image, Part
from hardpoint.rpc.shared_memory.layout import (
    CLOSED,
    CONTINUED,
    FRAGMENT,
    FRAME,
    HEAD,
    INLINE,
    PAD,
    SLAB,
    SLABBED,
    WRITER_WAITS,
    RingLayout,
)
from hardpoint.rpc.shared_memory.memory import Fence, Memory
from hardpoint.rpc.shared_memory.slabs import Slabs

_HEADER = FRAME.size
_WAIT_S = 0.02
"""Longest sleep of a writer that has no room: readers look for it without a fence."""


class RingWriter:
    """Writes messages that every reader gets, in order.

    Small ones lie in the ring; large ones in the arena, copied once; those for which the arena has
    no room stream through the ring in fragments. ``room`` is the event that readers ring for space;
    ``wake`` wakes readers that sleep, between fragments; ``control`` are the words with the flag
    CLOSED, if they are not this ring's own.
    """

    def __init__(
        self,
        memory: Memory,
        layout: RingLayout,
        room: Event,
        spin_s: float,
        wake: Callable[[], None],
        control: memoryview | None = None,
    ) -> None:
        self._wake = wake
        self._control = memory.words if control is None else control
        self._memory = memory
        self._layout = layout
        self._room = room
        self._spin_s = spin_s
        self._bytes = memory.bytes
        self._words = memory.words
        self._mask = layout.capacity - 1
        self._largest = layout.capacity // 4
        self._fence = Fence()
        self._slabs = Slabs(memory, layout)
        self._head = 0
        self._limit = layout.capacity  # up to here there is room for certain

    def put(
        self,
        kind: int,
        name: bytes,
        ids: tuple[int, int, int],
        data: Part = b"",
        buffers: Sequence[memoryview] = (),
        deadline: float | None = None,
    ) -> None:
        """Write one message: ``ids`` are call id, generation and rank. Returns when it is visible;
        waking the readers is the caller's.

        Raises CallTimeoutError if there was no room by ``deadline`` (monotonic s), and
        ChannelClosedError.
        """
        size = len(data)
        length = (_HEADER + len(name) + size + 7) & ~7
        if buffers or length > self._largest:
            self._put_large(kind, name, ids, Image([data, *buffers]), deadline)
            return
        at = self._claim(length, deadline)
        FRAME.pack_into(self._bytes, at, length, INLINE, kind, len(name), *ids, 1, size, 0)
        at += _HEADER
        end = at + len(name)
        self._bytes[at:end] = name
        self._bytes[end : end + size] = data
        self._publish(length)

    def _put_large(
        self,
        kind: int,
        name: bytes,
        ids: tuple[int, int, int],
        image: Image,
        deadline: float | None,
    ) -> None:
        slab = self._slabs.take(image.size)
        if slab is None:
            self._stream(kind, name, ids, image, deadline)
            return
        image.write(self._bytes[slab.offset : slab.offset + image.size])
        length = (_HEADER + SLAB.size + len(name) + 7) & ~7
        try:
            at = self._claim(length, deadline)
        except BaseException:
            self._slabs.give_back(slab)
            raise
        parts = len(image.parts)
        FRAME.pack_into(
            self._bytes, at, length, SLABBED, kind, len(name), *ids, parts, slab.index, slab.use
        )
        SLAB.pack_into(self._bytes, at + _HEADER, slab.offset, image.size)
        at += _HEADER + SLAB.size
        self._bytes[at : at + len(name)] = name
        self._publish(length)

    def _stream(
        self,
        kind: int,
        name: bytes,
        ids: tuple[int, int, int],
        image: Image,
        deadline: float | None,
    ) -> None:
        """Send an image in fragments. Who reads the first one of another message drops this one."""
        parts = len(image.parts)
        for piece in image.pieces(self._largest - _HEADER - len(name) - 8):
            length = (_HEADER + len(name) + len(piece) + 7) & ~7
            at = self._claim(length, deadline)
            FRAME.pack_into(
                self._bytes, at, length, FRAGMENT, kind, len(name), *ids, parts, len(piece),
                image.size,
            )  # fmt: skip
            at += _HEADER
            self._bytes[at : at + len(name)] = name
            at += len(name)
            self._bytes[at : at + len(piece)] = piece
            self._publish(length)
            self._wake()
            kind, name = CONTINUED, b""

    def _publish(self, length: int) -> None:
        self._head += length
        self._words[HEAD] = self._head

    def _claim(self, length: int, deadline: float | None) -> int:
        """Return the offset of ``length`` contiguous bytes; what is left at the end is padded."""
        capacity = self._layout.capacity
        at = self._head & self._mask
        rest = capacity - at
        if length <= rest:
            if self._head + length > self._limit:
                self._make_room(length, deadline)
            return self._layout.ring_at + at
        if self._head + rest + length > self._limit:
            self._make_room(rest + length, deadline)
        FRAME.pack_into(self._bytes, self._layout.ring_at + at, rest, PAD, *(0,) * 8) if (
            rest >= _HEADER
        ) else self._pad(self._layout.ring_at + at, rest)
        self._head += rest
        return self._layout.ring_at

    def _pad(self, at: int, rest: int) -> None:
        self._bytes[at : at + 8] = rest.to_bytes(4, "little") + bytes((PAD, 0, 0, 0))

    def _make_room(self, length: int, deadline: float | None) -> None:
        """Wait until the slowest reader leaves ``length`` bytes."""
        layout, words, goal = self._layout, self._words, self._head + length
        tails = [layout.tail(reader) for reader in range(layout.readers)]
        spin_until = time.monotonic() + self._spin_s
        while True:
            if self._control[CLOSED]:
                raise ChannelClosedError("the channel was closed while a message had no room")
            self._limit = min(words[tail] for tail in tails) + layout.capacity
            if self._limit >= goal:
                words[WRITER_WAITS] = 0
                return
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
