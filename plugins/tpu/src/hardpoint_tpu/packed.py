"""Stored numbers to float32, with numpy, bit for bit as the ``gguf`` package unpacks them.

A packed block is a half-precision scale (and minimum) followed by the numbers of 32 neighbours
along the innermost dimension; layouts: ``block_q4_1`` and ``block_q8_0`` in ggml's
``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
BLOCK: Final = 32


def unpack_q8_0(blocks: Bytes) -> Floats:
    """Unpack [n, 34] bytes to [n, 32]: scale times signed bytes."""
    numbers = blocks[:, 2:].view(np.int8).astype(np.float32)
    numbers *= _halves(blocks[:, :2])
    return numbers


def unpack_q4_1(blocks: Bytes) -> Floats:
    """Unpack [n, 20] bytes to [n, 32]: scale times nibble plus minimum. The low nibbles of the 16
    bytes are the first 16 numbers.
    """
    nibbles = np.ascontiguousarray(blocks[:, 4:])
    numbers = np.empty((len(blocks), BLOCK), np.float32)
    numbers[:, :16] = nibbles & 15
    numbers[:, 16:] = nibbles >> 4
    numbers *= _halves(blocks[:, :2])
    numbers += _halves(blocks[:, 2:4])
    return numbers


def _halves(part: Bytes) -> Floats:
    return np.ascontiguousarray(part).view(np.float16).astype(np.float32)


def widen_bfloat16(raw: Bytes) -> Floats:
    """Return the float32 whose upper half each bfloat16 is: exactly its value."""
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


UNPACKERS: Final = MappingProxyType[str, Callable[[Bytes], Floats]](
    {"Q8_0": unpack_q8_0, "Q4_1": unpack_q4_1}
)
"""Block type -> function from [blocks, bytes of a block] to [blocks, 32]."""
PLAIN: Final = MappingProxyType[str, Callable[[Bytes], Floats]](
    {
        "F64": lambda raw: raw.view(np.float64).astype(np.float32),
        "F32": lambda raw: raw.view(np.float32),
        "F16": lambda raw: raw.view(np.float16).astype(np.float32),
        "BF16": widen_bfloat16,
    }
)
"""Element type -> function from flat bytes to float32; GGUF and safetensors name them alike."""


def pairs_to_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Bring each head's rotary rows [heads * size, ...] from GGUF's pairs to the halves of Hugging
    Face models.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
