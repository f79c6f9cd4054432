"""Packed tensors to float32, with torch operations, bit for bit as the ``gguf`` package does it.

A block is a half-precision scale (and minimum) followed by the packed numbers of 32 neighbours
along the innermost dimension; layouts: ``block_q4_1`` and ``block_q8_0`` in ggml's
``ggml-common.h``. A number times its scale has at most 19 significant bits, so the products are
exact and the order of operations cannot change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

NIBBLES: Final = 0x0F0F0F0F0F0F0F0F  # the low half of each of eight bytes


def _aligned(part: Tensor) -> Tensor:
    # contiguous() would leave a single block where it is, at an offset that wider types refuse
    return part.clone(memory_format=torch.contiguous_format)


def _scales(blocks: Tensor, count: int) -> Tensor:
    return _aligned(blocks[:, : 2 * count]).view(torch.float16).float()


def unpack_q8_0(blocks: Tensor) -> Tensor:
    """Unpack [n, 34] bytes to [n, 32] float32: scale times signed bytes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_scales(blocks, 1))


def unpack_q4_1(blocks: Tensor) -> Tensor:
    """Unpack [n, 20] bytes to [n, 32] float32: scale times nibble plus minimum.

    The low nibbles of the 16 bytes are the first 16 numbers, the high ones the last 16. Eight bytes
    are taken apart at a time: a third of the time of byte-wise masks.
    """
    scales = _scales(blocks, 2)
    words = _aligned(blocks[:, 4:]).view(torch.int64)
    halves = torch.stack((words & NIBBLES, (words >> 4) & NIBBLES), dim=1)
    numbers = halves.view(torch.uint8).view(-1, 32).float()
    return numbers.mul_(scales[:, :1]).add_(scales[:, 1:])


UNPACKERS: Final = MappingProxyType[str, Callable[[Tensor], Tensor]](
    {"Q8_0": unpack_q8_0, "Q4_1": unpack_q4_1}
)
"""Block type -> function from [number of blocks, bytes of a block] to float32."""
PLAIN: Final = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
)
"""Element types that are read as they are; GGUF and safetensors use the same names."""


def pair_rows_to_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Bring a head's rotary rows from GGUF's pairs to the halves of Hugging Face models.

    ``rows`` is [heads * size, ...], packed or not: rows move as wholes.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
