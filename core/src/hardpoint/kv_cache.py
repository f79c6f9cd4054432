"""The KV cache as data: what each layer needs, and what each rank shall allocate.

Sizes are in tokens and bytes. A block holds ``block_size`` consecutive positions of one request in
every layer of a group; block 0 is the null block and is never owned by a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from attrs import Factory, field, frozen

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
}
"""Bytes of one element, by the dtype names used in configuration and messages."""


class KVCacheKind(Enum):
    """The built-in block rules. A plugin's own kind names the built-in kind that it ``follows``."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    RECURRENT = "recurrent"
    ENCODER_ONLY = "encoder_only"
    CROSS = "cross"


@frozen(kw_only=True)
class KVCacheSpec:
    """What one attention layer keeps for each block.

    ``page_bytes`` is what the worker reports for one block of this layer; unset, it is
    ``num_kv_heads * block_size * (head_size_k + head_size_v) * itemsize``. ``window`` is in tokens,
    for SLIDING and CHUNKED. ``kind`` is free text for plugins; ``follows`` gives the scheduler the
    rule to use.
    """

    block_size: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    dtype: str
    kind: str = KVCacheKind.FULL.value
    follows: KVCacheKind = KVCacheKind.FULL
    window: int | None = None
    page_bytes: int = field(
        default=Factory(
            lambda self: (
                self.num_kv_heads
                * self.block_size
                * (self.head_size_k + self.head_size_v)
                * DTYPE_BYTES[self.dtype]
            ),
            takes_self=True,
        )
    )
    extra: Mapping[str, object] = field(factory=dict)


@frozen(kw_only=True)
class KVCacheTensor:
    """One buffer to allocate: its bytes and the layers whose pages live in it (several: they share
    it).
    """

    num_bytes: int
    layers: tuple[str, ...]


@frozen(kw_only=True)
class KVCacheGroup:
    """Layers that share one block table, and the spec they agree on."""

    layers: tuple[str, ...]
    spec: KVCacheSpec


@frozen(kw_only=True)
class KVCacheConfig:
    """What one rank shall allocate. ``num_blocks`` is equal on all ranks and includes the null
    block.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[KVCacheTensor, ...]
    extra: Mapping[str, object] = field(factory=dict)

    @property
    def block_size(self) -> int:
        """Tokens a block holds for the engine: the least common multiple over the groups."""
        return math.lcm(*(group.spec.block_size for group in self.groups))
