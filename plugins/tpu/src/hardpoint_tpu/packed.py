"""Stored numbers to float32 with numpy: its words for :mod:`hardpoint.checkpoints.unpacking`."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import numpy as np
from hardpoint.checkpoints.float8 import FLOAT8
from hardpoint.checkpoints.unpacking import UNPACKERS
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class NumpyArrays:
    """The operations of :class:`hardpoint.checkpoints.unpacking.Arrays`."""

    def floats(self, numbers: Bytes) -> Floats:
        """Widen bytes."""
        return numbers.astype(np.float32)

    def signed(self, numbers: Bytes) -> Floats:
        """Widen signed bytes."""
        return numbers.view(np.int8).astype(np.float32)

    def halves(self, pairs: Bytes) -> Floats:
        """Widen half-precision numbers."""
        return np.ascontiguousarray(pairs).view(np.float16).astype(np.float32)

    def nibbles(self, packed: Bytes) -> Bytes:
        """Part each byte."""
        return np.stack((packed & 15, packed >> 4), axis=-2)

    def bits(self, packed: Bytes, width: int) -> Bytes:
        """Shift each byte by every multiple of the width."""
        shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(-1, 1)
        return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)

    def joined(self, parts: list[Bytes]) -> Bytes:
        """Join along the last dimension."""
        return np.concatenate(parts, axis=-1)


NUMPY: Final = NumpyArrays()


def unpack(kind: str, blocks: Bytes) -> Floats:
    """Unpack [n, bytes of a block] of the block type ``kind`` to [n, numbers of a block]."""
    numbers: Floats = UNPACKERS[kind](NUMPY, blocks)
    return numbers


def widen_bfloat16(raw: Bytes) -> Floats:
    """Return the float32 whose upper half each bfloat16 is: exactly its value."""
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


PLAIN: Final = MappingProxyType[str, Callable[[Bytes], Floats]](
    {
        "F64": lambda raw: raw.view(np.float64).astype(np.float32),
        "F32": lambda raw: raw.view(np.float32),
        "F16": lambda raw: raw.view(np.float16).astype(np.float32),
        "BF16": widen_bfloat16,
        "F8_E4M3": lambda raw: np.asarray(FLOAT8["F8_E4M3"], np.float32)[raw],
        "F8_E5M2": lambda raw: np.asarray(FLOAT8["F8_E5M2"], np.float32)[raw],
    }
)
"""Element type -> function from flat bytes to float32; GGUF and safetensors name them alike."""


def pairs_to_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Bring each head's rotary rows [heads * size, ...] from GGUF's pairs to the halves of Hugging
    Face models.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
