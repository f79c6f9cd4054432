"""Where everything lies in a ring's memory, as 64-bit word indices and byte offsets.

First control words, each writer's on cache lines of its own; then the ring of frames; then an arena
for large messages, whose pages are touched only when used.
"""

from __future__ import annotations

import struct

from attrs import field, frozen

from hardpoint.rpc.shared_memory.memory import PAGE

HEAD, WRITER_CPU, WRITER_WAITS, CLOSED, DRIVER_SLEEPS = 0, 1, 8, 16, 24
"""WRITER_CPU: one more than the number of the processor on which the last frame was written; 0 if
that is not known.
"""
_READERS, _PER_READER, _LINE = 32, 16, 8
SLOTS = 64
"""Large messages that can be held at once; more of them stream through the ring."""

FRAME = struct.Struct("<IBBHQIi")
"""The header: bytes that follow, storage, kind, bytes of the name, call id, generation, rank. If it
is in line, name and data follow. The next frame begins at the next multiple of 8; a PAD reaches to
the ring's end.
"""
SLAB = struct.Struct("<QQQII")
"""After the header, of a message in the arena: offset and bytes of its image, the slot's use, the
slot, the number of parts. Then the name.
"""
STREAM = struct.Struct("<QQ")
"""After the header, of a fragment: bytes of the whole image, the number of parts. Then the name,
with the first one, and a piece of the image.
"""
LONGEST_NAME = 512
ALIGN = 64
INLINE, SLABBED, FRAGMENT, PAD = 1, 2, 3, 4
CONTINUED, CALL, NOTHING, VALUE, FAILURE, QUEUED = 0, 1, 2, 3, 4, 5
"""Kinds of frames; CONTINUED is a further fragment, QUEUED a call that may be taken back."""


@frozen(kw_only=True)
class RingLayout:
    """One writer, ``readers`` readers; ``capacity`` bytes of ring (a power of two) and ``arena``
    bytes for large messages.
    """

    readers: int
    capacity: int
    arena: int
    slots: int = field(init=False)
    sleepers: int = field(init=False)
    ring_at: int = field(init=False)
    arena_at: int = field(init=False)
    size: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        slots = _READERS + self.readers * _PER_READER
        sleepers = -(-(slots + SLOTS * (1 + self.readers)) // _LINE) * _LINE
        words = sleepers + self.readers
        ring_at = -(-words * 8 // PAGE) * PAGE
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "sleepers", sleepers)
        object.__setattr__(self, "ring_at", ring_at)
        object.__setattr__(self, "arena_at", ring_at + self.capacity)
        object.__setattr__(self, "size", ring_at + self.capacity + self.arena)

    def tail(self, reader: int) -> int:
        """Word: how far ``reader`` has read."""
        return _READERS + reader * _PER_READER

    def sleeps(self, reader: int) -> int:
        """Word: whether ``reader`` is to be woken. All are side by side, written by those that fall
        asleep and looked at with every message, at once.
        """
        return self.sleepers + reader

    def released(self, slot: int, reader: int) -> int:
        """Word: the last use of ``slot`` that ``reader`` has no view of any more."""
        return self.slots + slot * (1 + self.readers) + 1 + reader
