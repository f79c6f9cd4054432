"""What the ranks tell each other, as bytes."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from enum import IntEnum

from attrs import frozen
from hardpoint.records import WorkerHealth

Buffer = bytes | memoryview

HEADER = struct.Struct("<BxHIqq")
_SIZE = struct.Struct("<Q")
_BEAT = struct.Struct("<qdd")
LONGEST_TEXT = 80
"""Bytes of a method's name in a sign of life."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """The sender has opened all of its lines."""
    BEAT = 2
    """A sign of life."""
    LEAVE = 3
    """The sender ends its part; the text says why, if it was not asked to."""
    NOTE = 4
    """The sender makes the call of this number: its name and the digests of its parts, as JSON."""
    CALL = 5
    """Rank 0 wants this call run."""
    NOTHING = 6
    VALUE = 7
    FAILURE = 8
    """Answers to calls."""
    PING = 9
    """A sign of life is wanted now."""
    STEP = 10
    """A call for the resident loop."""
    END_LOOP = 11
    OUTCOME = 12
    """What the sender's worker chose in the step of this number: digests, as JSON."""


@frozen
class Frame:
    """One message: ``parts`` depend on its kind."""

    kind: int
    call_id: int = 0
    generation: int = 0
    parts: Sequence[Buffer] = ()

    def pieces(self) -> list[Buffer]:
        """Return what travels."""
        sizes = b"".join(_SIZE.pack(memoryview(part).nbytes) for part in self.parts)
        head = HEADER.pack(self.kind, len(self.parts), 0, self.call_id, self.generation)
        return [head + sizes, *self.parts]

    @property
    def text(self) -> str:
        """The first part, as text."""
        return bytes(self.parts[0]).decode(errors="replace") if self.parts else ""


LARGEST = 1 << 30
"""Bytes of a frame that is taken."""


class FrameError(ValueError):
    """What came is no frame, or a larger one than is taken."""


class Reading:
    """Frames out of the bytes of one line, in whatever pieces they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, data: bytes) -> list[Frame]:
        """Return the frames that ``data`` completes."""
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        held = self._buffer
        if len(held) < HEADER.size:
            return None
        kind, count, _, call_id, generation = HEADER.unpack_from(held)
        start = HEADER.size + count * _SIZE.size
        if len(held) < start:
            return None
        sizes = [_SIZE.unpack_from(held, HEADER.size + i * _SIZE.size)[0] for i in range(count)]
        if start + sum(sizes) > LARGEST:
            raise FrameError(f"it has {sum(sizes)} bytes; at most {LARGEST} are taken")
        if len(held) < start + sum(sizes):
            return None
        parts = []
        for size in sizes:
            parts.append(bytes(held[start : start + size]))
            start += size
        del held[:start]
        return Frame(kind, call_id, generation, parts)


def beat(health: WorkerHealth | None, text: str) -> Frame:
    """Return a sign of life with what the work loop wrote of its progress."""
    step = -1 if health is None else health.step_id
    busy = math.nan if health is None or health.busy_since is None else health.busy_since
    return Frame(
        Kind.BEAT,
        parts=[
            _BEAT.pack(step, busy, time.monotonic()) + text.encode(errors="replace")[:LONGEST_TEXT]
        ],
    )


@frozen
class Beat:
    """A sign of life as it arrived; ``busy_since`` and ``clock``, when it was sent, are in
    monotonic s of the sender's host.
    """

    step_id: int
    busy_since: float | None
    clock: float
    text: str

    @classmethod
    def of(cls, frame: Frame) -> Beat:
        """Read it."""
        data = frame.parts[0]
        step, busy, clock = _BEAT.unpack_from(data)
        text = bytes(data[_BEAT.size :]).decode(errors="replace")
        return cls(step, None if math.isnan(busy) else busy, clock, text)
