"""Packed blocks of GGUF to numbers, written once over whatever array library a platform has.

``UNPACKERS`` is the one table of the block types that are read. Its functions take an
:class:`Arrays` (a few operations, which each library words differently) and blocks of bytes
[n, bytes of a block], and return float32 [n, numbers of a block], bit for bit what the ``gguf``
package gives: a half-precision scale times a packed number (and times a small whole scale) has at
most 24 significant bits, so products are exact and the only rounding is that of adding a minimum.

Layouts: ``block_q4_0`` ... ``block_q6_K`` in ggml's ``ggml-common.h``. "Halves" below: the low
nibbles of a run of bytes are its first numbers, the high nibbles its last.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, Protocol

from hardpoint.checkpoints.tables import FLOAT_TYPES

Array = Any
"""An array of the library in use: it slices, reshapes, and has ``& | >> << + - *`` as numpy has."""
PLAIN_TYPES: Final = tuple(FLOAT_TYPES)
"""Element types that are read as they are; GGUF and safetensors name them alike."""


class Arrays(Protocol):
    """What an array library must do; bytes are uint8, results the caller's own."""

    def floats(self, numbers: Array) -> Array:
        """Return bytes as float32 of the same shape."""

    def signed(self, numbers: Array) -> Array:
        """Return bytes, read as int8, as float32 of the same shape."""

    def halves(self, pairs: Array) -> Array:
        """Return [n, 2k] bytes, read as half-precision numbers, as float32 [n, k]."""

    def nibbles(self, packed: Array) -> Array:
        """Return [..., k] bytes, k a multiple of 8, as [..., 2, k]: low nibbles, high nibbles."""

    def bits(self, packed: Array, width: int) -> Array:
        """Return [..., k] bytes as [..., 8 / width, k]: the fields of ``width`` bits, low first."""

    def joined(self, parts: list[Array]) -> Array:
        """Return arrays joined along the last dimension."""


def unpack_q4_0(arrays: Arrays, blocks: Array) -> Array:
    """18 bytes: scale, nibbles in halves; numbers less 8."""
    numbers = arrays.floats(arrays.nibbles(blocks[:, 2:]).reshape(-1, 32))
    numbers -= 8
    numbers *= arrays.halves(blocks[:, :2])
    return numbers


def unpack_q4_1(arrays: Arrays, blocks: Array) -> Array:
    """20 bytes: scale, minimum, nibbles in halves."""
    numbers = arrays.floats(arrays.nibbles(blocks[:, 4:]).reshape(-1, 32))
    return _scaled(numbers, arrays.halves(blocks[:, :4]))


def unpack_q5_0(arrays: Arrays, blocks: Array) -> Array:
    """22 bytes: scale, a fifth bit for each number, nibbles in halves; numbers less 16."""
    numbers = arrays.floats(_five_bits(arrays, blocks[:, 2:6], blocks[:, 6:]))
    numbers -= 16
    numbers *= arrays.halves(blocks[:, :2])
    return numbers


def unpack_q5_1(arrays: Arrays, blocks: Array) -> Array:
    """24 bytes: scale, minimum, a fifth bit for each number, nibbles in halves."""
    numbers = arrays.floats(_five_bits(arrays, blocks[:, 4:8], blocks[:, 8:]))
    return _scaled(numbers, arrays.halves(blocks[:, :4]))


def unpack_q8_0(arrays: Arrays, blocks: Array) -> Array:
    """34 bytes: scale, signed bytes."""
    numbers = arrays.signed(blocks[:, 2:])
    numbers *= arrays.halves(blocks[:, :2])
    return numbers


def unpack_q4_k(arrays: Arrays, blocks: Array) -> Array:
    """144 bytes: scale, scale of the minima, 8 packed scales and minima, 4 runs of 32 in halves."""
    nibbles = arrays.nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _sub_blocks(arrays, blocks[:, :16], arrays.floats(nibbles.reshape(-1, 8, 32)))


def unpack_q5_k(arrays: Arrays, blocks: Array) -> Array:
    """176 bytes: as Q4_K, with 32 bytes of fifth bits before the nibbles, bit i for run i."""
    numbers = arrays.nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    numbers |= arrays.bits(blocks[:, 16:48], 1) << 4
    return _sub_blocks(arrays, blocks[:, :16], arrays.floats(numbers))


def unpack_q6_k(arrays: Arrays, blocks: Array) -> Array:
    """210 bytes: low nibbles in 2 runs of 64, upper pairs of bits in 2 runs of 32, 16 signed
    scales, scale; numbers less 32.
    """
    packed = arrays.nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    packed |= arrays.bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32) << 4
    numbers = arrays.floats(packed.reshape(-1, 16, 16))
    numbers -= 32
    scales = arrays.signed(blocks[:, 192:208])
    scales *= arrays.halves(blocks[:, 208:])
    numbers *= scales.reshape(-1, 16, 1)
    return numbers.reshape(-1, 256)


def _scaled(numbers: Array, scale_and_minimum: Array) -> Array:
    numbers *= scale_and_minimum[:, :1]
    numbers += scale_and_minimum[:, 1:]
    return numbers


def _five_bits(arrays: Arrays, fifth: Array, packed: Array) -> Array:
    """Return [n, 32] bytes: nibbles with bit i of the four bytes ``fifth`` above number i."""
    numbers = arrays.nibbles(packed).reshape(-1, 32)
    bits = arrays.bits(fifth.reshape(-1, 4, 1), 1)  # [n, 4, 8, 1]: in the order of the numbers
    numbers |= bits.reshape(-1, 32) << 4
    return numbers


def _sub_blocks(arrays: Arrays, head: Array, numbers: Array) -> Array:
    """Scale [n, 8, 32] numbers by a K-block's head: two scales, then 8 of 6 bits and 8 minima.

    Of the 12 bytes, four hold scales 0-3, four minima 0-3 (six bits each), and four the low
    nibbles of scales 4-7 (low) and minima 4-7 (high), whose upper two bits top the first eight.
    """
    both, packed = arrays.halves(head[:, :4]), head[:, 4:]
    first, last = packed[:, :8], packed[:, 8:]
    upper = (first >> 2) & 0x30
    scales = arrays.joined([first[:, :4] & 0x3F, (last & 0x0F) | upper[:, :4]])
    minima = arrays.joined([first[:, 4:] & 0x3F, (last >> 4) | upper[:, 4:]])
    numbers *= (arrays.floats(scales) * both[:, :1]).reshape(-1, 8, 1)
    numbers -= (arrays.floats(minima) * both[:, 1:]).reshape(-1, 8, 1)
    return numbers.reshape(-1, 256)


UNPACKERS: Final = MappingProxyType[str, Callable[[Arrays, Array], Array]](
    {
        "Q4_0": unpack_q4_0,
        "Q4_1": unpack_q4_1,
        "Q5_0": unpack_q5_0,
        "Q5_1": unpack_q5_1,
        "Q8_0": unpack_q8_0,
        "Q4_K": unpack_q4_k,
        "Q5_K": unpack_q5_k,
        "Q6_K": unpack_q6_k,
    }
)
"""Block type -> function from (library, [blocks, bytes of a block]) to [blocks, numbers]."""
READ_TYPES: Final = (*PLAIN_TYPES, *UNPACKERS)
"""Every type of a GGUF tensor that the built-in loaders read."""
