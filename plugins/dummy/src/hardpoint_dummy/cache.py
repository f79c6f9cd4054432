"""The fake KV cache: cells of 64 bits in blocks, zero where nothing was written.

What a request does not overwrite stays, as in a real cache, so a wrong or stale block is read as
what it is and changes the answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hardpoint.messages import MessageError

CELL = 8
"""Bytes of one cell."""


class FakeCache:
    """One pool of blocks for each KV cache group. Blocks take memory when first written."""

    def __init__(self, num_blocks: int, block_sizes: Sequence[int]) -> None:
        self.num_blocks = num_blocks
        self.block_sizes = tuple(block_sizes)
        self._pools: list[dict[int, array[int]]] = [{} for _ in block_sizes]

    def check_table(self, req_id: str, tables: Sequence[Sequence[int]], length: int) -> None:
        """Raise MessageError unless the block tables are valid and hold ``length`` positions."""
        if len(tables) != len(self.block_sizes):
            raise MessageError(
                f"request {req_id}: {len(tables)} block tables for {len(self.block_sizes)} groups"
            )
        for group, (table, size) in enumerate(zip(tables, self.block_sizes, strict=True)):
            if len(table) * size < length:
                raise MessageError(
                    f"request {req_id}: {len(table)} blocks of {size} tokens in group {group} do "
                    f"not hold {length} positions"
                )
            for block in table:
                if not 0 < block < self.num_blocks:
                    raise MessageError(
                        f"request {req_id}: block {block} is not in [1, {self.num_blocks})"
                    )

    def write(self, tables: Sequence[Sequence[int]], position: int, cell: int) -> None:
        """Write the cell of ``position`` in every group."""
        for pool, table, size in zip(self._pools, tables, self.block_sizes, strict=True):
            index = table[position // size]
            block = pool.get(index)
            if block is None:
                block = pool[index] = array("Q", bytes(CELL * size))
            block[position % size] = cell

    def read(self, tables: Sequence[Sequence[int]], position: int) -> int:
        """Return the cell of ``position`` in the first group."""
        size = self.block_sizes[0]
        block = self._pools[0].get(tables[0][position // size])
        return 0 if block is None else block[position % size]

    def contents(self, tables: Sequence[Sequence[int]], length: int) -> list[array[int]]:
        """Return, for each group, the cells of positions [0, length)."""
        result = []
        for pool, table, size in zip(self._pools, tables, self.block_sizes, strict=True):
            blank = array("Q", bytes(CELL * size))
            cells = array("Q")
            for index in table[: -(-length // size)]:
                cells += pool.get(index, blank)
            del cells[length:]
            result.append(cells)
        return result

    def zero(self, block: int) -> None:
        """Clear a block in every group."""
        for pool in self._pools:
            pool.pop(block, None)

    def copy(self, group: int, source: int, destination: int) -> None:
        """Copy a block of one group."""
        pool = self._pools[group]
        if source in pool:
            pool[destination] = pool[source][:]
        else:
            pool.pop(destination, None)

    def clear(self) -> None:
        """Lose everything."""
        for pool in self._pools:
            pool.clear()
