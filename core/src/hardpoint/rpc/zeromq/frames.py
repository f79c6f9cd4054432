"""What travels: a header of fixed size, the call's name, data, buffers; each a frame."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from attrs import frozen

from hardpoint.rpc.calls import PackedCall
from hardpoint.rpc.encoding import Buffer, Codec, Pieces

HELLO, CALL, NOTHING, VALUE, FAILURE, CLOSE = 1, 2, 3, 4, 5, 6
LARGEST = 1 << 34
"""Bytes of a frame that is accepted."""
_HEADER = struct.Struct("<4sBBxxiQQI")
_MAGIC = b"hpz1"


@frozen
class Header:
    """Who, what and which: ``sequence`` numbers what the driver sends; a reply repeats it."""

    kind: int
    sequence: int = 0
    call_id: int = 0
    generation: int = 0
    rank: int = -1
    queued: bool = False

    def pack(self) -> bytes:
        """Return it as it travels."""
        return _HEADER.pack(
            _MAGIC, self.kind, self.queued, self.rank, self.sequence, self.call_id, self.generation
        )

    @classmethod
    def read(cls, data: Buffer) -> Header | None:
        """Return the header in a frame, or None if it is none."""
        if len(data) != _HEADER.size:
            return None
        magic, kind, queued, rank, sequence, call_id, generation = _HEADER.unpack(data)
        if magic != _MAGIC or not HELLO <= kind <= CLOSE:
            return None
        return cls(kind, sequence, call_id, generation, rank, bool(queued))


def content(frames: Sequence[memoryview]) -> Pieces:
    """Return data and buffers; small data as bytes, the rest as read-only views of what came."""
    if not frames:
        return b"", ()
    return bytes(frames[0]), [frame.toreadonly() for frame in frames[1:]]


def call_of(header: Header, frames: Sequence[memoryview], codec: Codec) -> PackedCall:
    """Return the call in the frames after the header."""
    name = bytes(frames[0]).decode("utf-8", "replace") if frames else ""
    data, buffers = content(frames[1:])
    return PackedCall(
        call_id=header.call_id,
        generation=header.generation,
        name=name,
        body=codec.parcel(data, buffers),
        reply_rank=None if header.rank < 0 else header.rank,
        queued=header.queued,
    )
