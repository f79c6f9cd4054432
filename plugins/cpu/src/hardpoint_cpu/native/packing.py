"""Weights into the library's packed forms, and back: numpy arrays in, numpy arrays out.

A matrix may be packed part by part, rows of several tensors below each other, and by several
threads, each with rows of its own: nothing but the rows decides the bytes.
"""

from __future__ import annotations

import numpy as np
from hardpoint.errors import HardpointError

from hardpoint_cpu.native.library import TYPES, load

ALIGNMENT = 64
"""Bytes at whose multiples packed matrices should begin."""

_REASONS = ("", "these do not go together", "a size is out of range", "there is no memory")


def layout() -> int:
    """Return the number of the packed bytes' layout; it is the same for every kind of processor."""
    number: int = load().hp_layout()
    return number


def packed_bytes(kind: str, rows: int, cols: int) -> int | None:
    """Return the bytes of a packed matrix [rows, cols] of ``kind``, one of
    :data:`~hardpoint_cpu.native.library.TYPES`; None if it cannot be packed so.
    """
    size: int = load().hp_pack_bytes(TYPES[kind], rows, cols)
    return None if size < 0 else size


def room(size: int) -> np.ndarray:
    """Return ``size`` zero bytes that begin where the library likes it."""
    whole = np.zeros(size + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + size]


def pack(
    source: np.ndarray,
    source_kind: str,
    kind: str,
    *,
    cols: int,
    rows: int | None = None,
    first: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Pack the rows of ``source``, in one piece, as rows from ``first`` on of a matrix [rows, cols]
    into ``out``, which is returned; without it into zeros (:func:`room`).

    ``source`` is [n, ...]: numbers of ``source_kind`` (bfloat16 as uint16), or the bytes of GGUF's
    blocks, which become packed of the same kind exactly. Raises HardpointError.
    """
    rows = len(source) if rows is None else rows
    size = packed_bytes(kind, rows, cols)
    if size is None or (out is not None and out.nbytes != size) or not source.flags.c_contiguous:
        raise HardpointError(
            f"{source_kind} {source.shape} cannot be packed as {kind} [{rows}, {cols}] in "
            f"{size if out is None else out.nbytes} bytes"
        )
    out = room(size) if out is None else out
    wrong = load().hp_pack(
        TYPES[kind], TYPES[source_kind], source.ctypes.data, first, len(source), rows, cols,
        out.ctypes.data,
    )  # fmt: skip
    _raise_if(wrong, f"packing {source_kind} {source.shape} as rows of {kind} [{rows}, {cols}]")
    return out


def unpack(
    data: np.ndarray, kind: str, *, rows: int, cols: int, first: int = 0, count: int | None = None
) -> np.ndarray:
    """Return ``count`` rows from ``first`` on of a matrix as float32 [count, cols]: the numbers
    that its kernels multiply with. Raises HardpointError.
    """
    count = rows - first if count is None else count
    out = np.empty((count, cols), np.float32)
    wrong = load().hp_unpack(
        TYPES[kind], data.ctypes.data, rows, cols, first, count, out.ctypes.data
    )
    _raise_if(wrong, f"unpacking rows {first} to {first + count} of {kind} [{rows}, {cols}]")
    return out


def _raise_if(wrong: int, what: str) -> None:
    if wrong:
        raise HardpointError(f"{what}: {_REASONS[wrong]}")
