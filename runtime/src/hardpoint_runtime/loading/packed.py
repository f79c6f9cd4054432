"""Packed tensors to float32 with torch: its words for :mod:`hardpoint.checkpoints.unpacking`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch
from hardpoint.checkpoints.unpacking import UNPACKERS
from torch import Tensor

NIBBLES: Final = 0x0F0F0F0F0F0F0F0F  # the low half of each of eight bytes
PLAIN: Final = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
)
"""Element types that are read as they are; GGUF and safetensors use the same names."""
FLOAT8: Final = MappingProxyType({"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2})
"""Element types of safetensors that may have a scale beside them."""


def _aligned(part: Tensor) -> Tensor:
    # contiguous() would leave a single block where it is, at an offset that wider types refuse
    return part.clone(memory_format=torch.contiguous_format)


class TorchArrays:
    """The operations of :class:`hardpoint.checkpoints.unpacking.Arrays`."""

    def floats(self, numbers: Tensor) -> Tensor:
        """Widen bytes."""
        return numbers.float()

    def signed(self, numbers: Tensor) -> Tensor:
        """Widen signed bytes."""
        return numbers.view(torch.int8).float()

    def halves(self, pairs: Tensor) -> Tensor:
        """Widen half-precision numbers."""
        return _aligned(pairs).view(torch.float16).float()

    def nibbles(self, packed: Tensor) -> Tensor:
        """Take eight bytes apart at a time: a third of the time of byte-wise masks."""
        words = _aligned(packed).view(torch.int64)
        return torch.stack((words & NIBBLES, (words >> 4) & NIBBLES), dim=-2).view(torch.uint8)

    def bits(self, packed: Tensor, width: int) -> Tensor:
        """Shift each byte by every multiple of the width."""
        shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
        return (packed.unsqueeze(-2) >> shifts) & ((1 << width) - 1)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Join along the last dimension."""
        return torch.cat(parts, dim=-1)


TORCH: Final = TorchArrays()


def unpack(kind: str, blocks: Tensor) -> Tensor:
    """Unpack [n, bytes of a block] of the block type ``kind`` to float32 [n, numbers of a block].

    Raises KeyError for a type that is not in :data:`hardpoint.checkpoints.unpacking.UNPACKERS`.
    """
    numbers: Tensor = UNPACKERS[kind](TORCH, blocks)
    return numbers


def pair_rows_to_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Bring a head's rotary rows from GGUF's pairs to the halves of Hugging Face models.

    ``rows`` is [heads * size, ...], packed or not: rows move as wholes.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
