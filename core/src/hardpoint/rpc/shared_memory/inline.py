"""The hot path of the channel: frames that lie in line, and the wait for them.

What stands here is the reference. ``core/native/ring.c`` does the same in C, over the same memory,
so that one end may use these classes and the other those; :func:`hot_path` chooses. Made of one
mapping each, and used by one thread at a time but for :meth:`InlineWriter.wake`.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hardpoint.rpc import codec
from hardpoint.rpc.shared_memory.bell import Event
from hardpoint.rpc.shared_memory.layout import (
    CLOSED,
    FRAME,
    HEAD,
    INLINE,
    NOTHING,
    VALUE,
    WRITER_WAITS,
)
from hardpoint.rpc.shared_memory.memory import Fence

_COMPILED = "hardpoint.rpc.shared_memory._native"
_HEADER = FRAME.size
_ROUND = _HEADER + 7
INTERFACE = 5
"""Raised with every change of these classes or of the layout: compiled code of another number, left
from an earlier installation, is not used.
"""
_KIND = 5
"""Where it stands in a header."""
_PLAIN = codec.PLAIN
_dumps_plain, _VERSION = codec.dumps_plain, codec.PLAIN_VERSION

Message = tuple[int, int, int, int, bytes, Any, Sequence[memoryview]]
"""Kind, call id, generation, rank, name, data, buffers. A bare tuple: the hottest path."""


class InlineWriter:
    """Writes frames that lie in line.

    ``head`` is where the next one begins; up to ``limit`` there is room for certain, and up to
    ``edge`` without a break, for what is not large. There are ``flags`` words from ``flags_at``, by
    which sleepers ask to be woken.
    """

    def __init__(
        self,
        memory: Any,
        ring_at: int,
        capacity: int,
        flags_at: int,
        flags: int,
        large_bytes: int,
    ) -> None:
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._ring_at = ring_at
        self._mask = capacity - 1
        self._flags_at = flags_at
        self._flags = slice(8 * flags_at, 8 * (flags_at + flags))
        self._awake = bytes(8 * flags)
        self._large_bytes = large_bytes
        self._pack = FRAME.pack_into
        self._fence = Fence()
        self.head = 0
        self.limit = capacity
        self.edge = capacity // 4
        self._closed = False

    def put(
        self,
        kind: int,
        call_id: int,
        generation: int,
        rank: int,
        name: bytes,
        data: bytes | memoryview,
    ) -> bool:
        """Write a frame; False, and nothing is written, if there is no room for it at once.

        It is visible when this returns, and what is read next is read after that (see Fence).
        """
        named = len(name)
        size = named + len(data)
        head = self.head
        end = head + ((size + _ROUND) & -8)
        if end > self.edge:
            if self._closed:
                raise ValueError("this end of the ring was given back")
            return False
        ring, at = self._bytes, self._ring_at + (head & self._mask)
        self._pack(ring, at, size, INLINE, kind, named, call_id, generation, rank)
        at += _HEADER
        if named:
            ring[at : at + named] = name
        ring[at + named : at + size] = data
        self.head = self._words[HEAD] = end
        self._fence()
        return True

    def put_plain(
        self, kind: int, call_id: int, generation: int, rank: int, name: bytes, value: object
    ) -> bool | None:
        """Write a frame with a plain value, or a tuple of such; None if it is neither."""
        large = self._large_bytes
        for part in value if type(value) is tuple else (value,):
            sort = type(part)
            if sort not in _PLAIN or (sort is bytes and len(part) >= large):
                return None
        return self.put(kind, call_id, generation, rank, name, _dumps_plain(value, _VERSION))

    def wake(self, events: tuple[Event, ...]) -> None:
        """Ring the event of each that asks to be woken, and take its flag away. Any thread; nothing
        once this was released.
        """
        try:
            if self._bytes[self._flags] == self._awake:
                return
            words = self._words
            for at, event in enumerate(events, self._flags_at):
                if words[at]:
                    words[at] = 0
                    event.wake()
        except ValueError:  # released meanwhile, when all were woken
            return

    def release(self) -> None:
        """Give the memory back: nothing can be written then. Idempotent."""
        self._closed, self.edge = True, 0
        self._words.release()
        self._bytes.release()


class InlineReader:
    """Reads frames that lie in line; ``tail`` is where the next one begins.

    ``tell_room()`` is called when a writer waits for the room that a frame leaves. With ``crowd``
    (see :mod:`~hardpoint.rpc.shared_memory.parting`) the compiled one goes to another processor
    when waiting has made it meet the writer on its own again and again, unless more run than the
    ``party`` that talks by the ring: ``met`` counts the frames for which it did, ``in_a_row`` the
    last of them, ``parted`` how often it went. This one, which cannot know, stays.
    """

    met = in_a_row = parted = 0

    def __init__(
        self,
        memory: Any,
        ring_at: int,
        capacity: int,
        tail_word: int,
        tell_room: Callable[[], None],
        crowd: str | None = None,
        party: int = 2,
    ) -> None:
        del crowd, party
        self._map = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._unpack = FRAME.unpack_from
        self._ring_at = ring_at
        self._size, self._mask = capacity, capacity - 1
        self._tail_word = tail_word
        self._tell_room = tell_room
        self._fence = Fence()
        self._counted = False
        self.tail = self._words[tail_word]

    def take(self) -> Any:
        """Return the next message; None if there is none, NotImplemented if it is not in line."""
        words, ring, tail = self._words, self._map, self.tail
        available = words[HEAD] - tail
        if available <= 0:
            return None
        place = tail & self._mask
        at = self._ring_at + place
        size, storage, kind, named, call_id, generation, rank = self._unpack(ring, at)
        length = (size + _ROUND) & -8
        if storage != INLINE or length > available or named > size or place + length > self._size:
            return NotImplemented
        at += _HEADER
        start = at + named
        data = ring[start : at + size]
        name = ring[at:start] if named else b""
        self.tail = words[self._tail_word] = tail + length
        if words[WRITER_WAITS]:
            self._tell_room()
        return (kind, call_id, generation, rank, name, data, ())

    def ready(self) -> bool:
        """Whether a frame is here."""
        return self._words[HEAD] != self.tail

    def kind(self) -> int:
        """Return the kind of the frame that is here."""
        return int(self._map[self._ring_at + (self.tail & self._mask) + _KIND])

    def next(self, seconds: float) -> Any:
        """Return the next message as :meth:`take` does; if none is here, yield the processor until
        one is, for ``seconds`` at most.
        """
        words, tail = self._words, self.tail
        if words[HEAD] == tail and seconds > 0:
            end = 0.0
            while True:
                os.sched_yield()  # first of all: who is to run next may need this core
                if words[HEAD] != tail:
                    break
                now = time.monotonic()
                if not end:
                    end = now + seconds
                elif now >= end:
                    break
        return self.take()

    def sleep(self, event: int, seconds: float, flag: int) -> bool:
        """Sleep until ``event`` is rung, with the word ``flag`` set meanwhile, unless a frame is
        here or the ring is closed; return whether a frame is here, or soon.

        A wake-up stays counted until the next sleep: what was waited for comes first.
        """
        words = self._words
        if self._counted:
            self._counted = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(event)
        words[flag] = 1
        self._fence()
        if not self.ready() and not words[CLOSED]:
            poll = select.poll()
            poll.register(event, select.POLLIN)
            self._counted = bool(poll.poll(seconds * 1000))
        found = not words[flag] or self.ready()
        if found:
            words[flag] = 0
        return found

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        self._words.release()
        self._bytes.release()


class ReplyRings:
    """All reply rings, by rank."""

    def __init__(self, readers: tuple[InlineReader, ...]) -> None:
        self._readers = readers

    def ready(self) -> int:
        """Return how many rings have a reply. Any thread."""
        return sum(reader.ready() for reader in self._readers)

    def spin(self, seconds: float, wanted: int) -> int:
        """Yield the processor until ``wanted`` rings have a reply, or for ``seconds`` since one
        more had; return how many have.
        """
        before, end = 0, time.monotonic() + seconds
        while True:
            os.sched_yield()  # before the first look, too: no answer is that quick
            ready = self.ready()
            now = time.monotonic()
            if ready >= wanted or (now >= end and ready <= before):
                return ready
            if ready > before:
                before, end = ready, now + seconds

    def collect(
        self,
        deliver: Callable[[int, int, int, bytes | None, None], object],
        gathers: Mapping[int, object] | None,
    ) -> int:
        """Call ``deliver(call id, rank, generation, data, None)`` for each value that is here,
        ``data`` being None for none. Return the first ring whose next message is none that lies in
        line, or -1.

        The compiled one enters a plain value into the Gather of its call itself, as
        :meth:`CallTable.acknowledge` does, if that is in ``gathers`` (by call id).
        """
        for rank, reader in enumerate(self._readers):
            while reader.ready():
                message = reader.take() if reader.kind() in (NOTHING, VALUE) else None
                if message is None or message is NotImplemented:
                    return rank
                kind, call_id, generation, _, _, data, _ = message
                deliver(call_id, rank, generation, data if kind == VALUE else None, None)
        return -1


class HotPath(Protocol):
    """What both ways offer."""

    InlineWriter: type[InlineWriter]
    InlineReader: type[InlineReader]
    ReplyRings: type[ReplyRings]


class _InPython:
    InlineWriter = InlineWriter
    InlineReader = InlineReader
    ReplyRings = ReplyRings


@cache
def why_not_native() -> str:
    """Return why this process has no compiled hot path; empty if it has one."""
    try:
        found = import_module(_COMPILED)
    except ImportError as error:
        told = Path(__file__).with_name("not_built.txt")
        return told.read_text().strip() if told.is_file() else str(error)
    if getattr(found, "INTERFACE", 0) != INTERFACE:
        return "it was compiled for another version of hardpoint; install that again"
    return ""


def hot_path(native: bool = True) -> HotPath:
    """Return the compiled classes if they were built and are wanted, else those of this module."""
    if native and not why_not_native():
        compiled: HotPath = import_module(_COMPILED)
        return compiled
    return _InPython()
