"""The reader's views of large messages, and the moment when the last of them is dropped."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.shared_memory.layout import SLOTS, WRITER_WAITS, RingLayout
from hardpoint.rpc.shared_memory.memory import Memory


@functools.cache
def _window_class(capacity: int) -> type[Any]:
    """Return a class of buffers of that size whose instances can be watched.

    Every view, and an array over it, holds the instance that exports the memory; so the instance
    dies with the last of them. A slice of an ``mmap`` has no such object.
    """
    return type("Window", (ctypes.c_char * capacity,), {})


class Windows:
    """Opens the arena's blocks for reading and marks each as released when no view is left."""

    def __init__(
        self, memory: Memory, layout: RingLayout, reader: int, tell_room: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._words = memory.words
        self._layout = layout
        self._reader = reader
        self._tell_room = tell_room
        self._held: dict[int, weakref.ref[Any]] = {}
        self._closed = False

    def open(self, slot: int, use: int, offset: int, size: int) -> memoryview:
        """Return a read-only view of a message. Raises ChannelClosedError for one that is not
        inside the arena.
        """
        layout = self._layout
        capacity = 1 << (max(size, 1) - 1).bit_length()
        inside = layout.arena_at <= offset <= offset + size <= layout.size
        word = layout.released(slot, self._reader) if slot < SLOTS else 0
        if not inside or not word or use <= self._words[word]:
            raise ChannelClosedError(
                f"a message is said to lie in slot {slot} (use {use}) at {offset}, {size} bytes "
                f"long: that is not to be found in this channel's memory"
            )
        capacity = min(capacity, layout.size - offset)
        window = _window_class(capacity).from_buffer(self._memory.map, offset)
        self._held[slot] = weakref.ref(window, functools.partial(self._release, slot, word, use))
        return memoryview(window).cast("B")[:size].toreadonly()

    def close(self) -> None:
        """Release nothing any more: the writer is gone."""
        self._closed = True

    def _release(self, slot: int, word: int, use: int, _: object) -> None:
        if self._closed:
            return
        self._words[word] = use
        if self._words[WRITER_WAITS]:
            self._tell_room()
