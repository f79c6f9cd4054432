"""Which KV blocks hold a request's positions: one table per KV cache group, and slot mapping.

Block i of a row holds positions [i * block_size, (i + 1) * block_size). Block 0 is the null block:
no request owns it, unused entries are 0. A *cache slot* is ``block * block_size + offset``; -1
means "write nothing".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from hardpoint.errors import HardpointError

from hardpoint_runtime.batch.columns import Array, Column, Columns

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheConfig
    from hardpoint.messages import BlockIds

WIDTH_TOKENS = 128
"""Rows are as wide as the longest request, rounded up to this many tokens: widths are few."""


class BlockTableError(HardpointError):
    """A request was given more blocks than its longest length needs, or ids outside the cache.

    What to do: nothing as a user: the engine's plan is at fault. Report it with the message.
    """


class BlockTable:
    """The block ids of every slot, for one KV cache group.

    Rows live in the request columns ``blocks.GROUP`` (int32 [width]) and ``num_blocks.GROUP``, so
    they are cleared and padded with all other columns. With ``split`` k, each block of the driver
    is k consecutive blocks of the kernel: id becomes id * k ... id * k + k - 1.
    """

    def __init__(
        self,
        columns: Columns,
        *,
        group: int,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        split: int = 1,
    ) -> None:
        if block_size % split:
            raise BlockTableError(f"a block of {block_size} tokens cannot be split into {split}")
        self.group = group
        self.block_size = block_size // split
        self.split = split
        self.num_blocks = num_blocks
        self._columns = columns
        self._ids, self._count = f"blocks.{group}", f"num_blocks.{group}"
        width = table_width(max_model_len, block_size) * split
        columns.declare(Column(name=self._ids, dtype="int32", shape=(width,), default=0, pad=0))
        columns.declare(Column(name=self._count, dtype="int32", default=0, pad=0))

    @property
    def width(self) -> int:
        """Kernel blocks that a row can hold."""
        return int(self._columns[self._ids].shape[1])

    def resize(self, max_model_len: int) -> None:
        """Adopt another longest length."""
        width = table_width(max_model_len, self.block_size * self.split) * self.split
        self._columns.resize(self._ids, width)

    def check(self, req_id: str, held: int, block_ids: Sequence[int]) -> None:
        """Raise BlockTableError naming the request if ``block_ids`` cannot follow ``held`` kernel
        blocks.
        """
        room = self.width // self.split - held // self.split
        if len(block_ids) > room:
            raise BlockTableError(
                f"request {req_id!r}: {len(block_ids)} more blocks in KV cache group {self.group}, "
                f"its row of {self.width // self.split} blocks has room for {room}"
            )
        for block in block_ids:
            if not 0 <= block < self.num_blocks:
                raise BlockTableError(
                    f"request {req_id!r}: block {block} of KV cache group {self.group} is outside "
                    f"the cache of {self.num_blocks} blocks"
                )

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row (checked before)."""
        if not block_ids:
            return
        start = int(self._columns[self._count][slot])
        ids: Array = np.asarray(block_ids, dtype=np.int32)
        if self.split > 1:
            ids = (ids[:, None] * self.split + np.arange(self.split, dtype=np.int32)).reshape(-1)
        self._columns[self._ids][slot, start : start + len(ids)] = ids
        self._columns[self._count][slot] = start + len(ids)

    def clear(self, slot: int) -> None:
        """Forget a row's blocks."""
        self._columns[self._ids][slot] = 0
        self._columns[self._count][slot] = 0

    def count(self, slot: int) -> int:
        """Kernel blocks in a row."""
        return int(self._columns[self._count][slot])

    def row(self, slot: int) -> Array:
        """A copy of a row's kernel block ids."""
        return self._columns[self._ids][slot, : self.count(slot)].copy()

    def gather(self, slots: Array, rows: int | None = None) -> Array:
        """Return int32 [rows, cols]: the rows of ``slots``, only as wide as the longest of them (at
        least 1); padding rows are all null blocks.
        """
        counts = self._columns[self._count][slots]
        cols = max(1, int(counts.max(initial=1)))
        return self._columns.gather(self._ids, slots, rows)[:, :cols]

    def slot_mapping(self, slots: Array, row_of_token: Array, positions: Array) -> Array:
        """Return the cache slot int64 [tokens] of each token: ``positions`` are in the request that
        row ``row_of_token`` of ``slots`` holds.
        """
        table = self._columns[self._ids]
        blocks: Array = table[slots[row_of_token], positions // self.block_size].astype(np.int64)
        mapped: Array = blocks * self.block_size + positions % self.block_size
        return mapped


class BlockTables:
    """The block tables of every KV cache group; ``tables[g]`` is that of group g."""

    def __init__(
        self, columns: Columns, kv_cache_config: KVCacheConfig, *, max_model_len: int
    ) -> None:
        self.tables = tuple(
            BlockTable(
                columns,
                group=index,
                block_size=group.spec.block_size,
                num_blocks=kv_cache_config.num_blocks,
                max_model_len=max_model_len,
            )
            for index, group in enumerate(kv_cache_config.groups)
        )

    def check(self, req_id: str, slot: int | None, block_ids: BlockIds) -> None:
        """Raise BlockTableError if the ids cannot be appended to ``slot`` (None: to an empty row).

        A model without attention has no group, and every request an empty tuple.
        """
        if len(block_ids) != len(self.tables):
            raise BlockTableError(
                f"request {req_id!r} brings blocks for {len(block_ids)} KV cache groups, "
                f"there are {len(self.tables)}"
            )
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.check(req_id, 0 if slot is None else table.count(slot), ids)

    def append(self, slot: int, block_ids: BlockIds) -> None:
        """Add blocks at the end of a slot's rows."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.append(slot, ids)

    def replace(self, slot: int, block_ids: BlockIds) -> None:
        """Make these the slot's only blocks."""
        self.clear(slot)
        self.append(slot, block_ids)

    def clear(self, slot: int) -> None:
        """Forget the slot's blocks in every group."""
        for table in self.tables:
            table.clear(slot)

    def resize(self, max_model_len: int) -> None:
        """Adopt another longest length in every group."""
        for table in self.tables:
            table.resize(max_model_len)


def table_width(max_model_len: int, block_size: int) -> int:
    """Blocks in a row: enough for ``max_model_len`` rounded up to WIDTH_TOKENS."""
    tokens = -(-max_model_len // WIDTH_TOKENS) * WIDTH_TOKENS
    return -(-tokens // block_size)


def context_parallel_slots(
    table: Array,
    row_of_token: Array,
    positions: Array,
    *,
    block_size: int,
    size: int,
    rank: int,
    interleave: int = 1,
) -> Array:
    """Return the cache slots of one context-parallel rank: -1 for tokens that another rank keeps.

    A virtual block holds ``block_size * size`` tokens, dealt to the ranks ``interleave`` at a time;
    each rank packs its own tokens in order. With ``size`` 1 it is the plain slot mapping.
    """
    virtual = block_size * size
    blocks = table[row_of_token, positions // virtual].astype(np.int64)
    offset = positions % virtual
    mine = (offset // interleave) % size == rank
    local = offset // (interleave * size) * interleave + offset % interleave
    return np.where(mine, blocks * block_size + local, -1)
