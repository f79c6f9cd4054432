"""What goes through a compiled graph: bytes alone, several pieces in one, so that Ray has nothing
to pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hardpoint.errors import EncodingError

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def size_of(pieces: Sequence[bytes | memoryview]) -> int:
    """Return the bytes of all ``pieces``."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def joined(pieces: Sequence[bytes | memoryview]) -> bytes:
    """Return ``pieces`` as one."""
    lengths = [_LENGTH.pack(memoryview(piece).nbytes) for piece in pieces]
    return b"".join((_COUNT.pack(len(pieces)), *lengths, *pieces))


def parted(data: bytes) -> list[memoryview]:
    """Return the pieces of what :func:`joined` made, uncopied; none of no bytes at all.

    Raises EncodingError for anything else.
    """
    if not data:
        return []
    try:
        (count,) = _COUNT.unpack_from(data)
        place = _COUNT.size + count * _LENGTH.size
        if place > len(data):
            raise EncodingError(f"{len(data)} bytes of a graph cannot hold {count} pieces")
        pieces, view = [], memoryview(data)
        for (length,) in _LENGTH.iter_unpack(view[_COUNT.size : place]):
            pieces.append(view[place : place + length])
            place += length
    except struct.error as error:
        raise EncodingError(f"{len(data)} bytes of a graph are no pieces: {error}") from error
    if place != len(data):
        raise EncodingError(f"{len(data)} bytes of a graph, and pieces of {place}")
    return pieces
