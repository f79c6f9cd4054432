"""The operation ``slot_mapping``: from block tables and positions to where tokens are cached."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import EXACT, launched

TOKENS = 256
"""Tokens that a program maps."""


@triton.jit
def slot_mapping_kernel(
    table,
    query_start,
    positions,
    slots,
    num_rows,
    num_tokens,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Map a part of one row's tokens; the row behind the last one is the padding."""
    row = tl.program_id(0)
    first = tl.load(query_start + row)
    last = tl.load(query_start + row + 1, mask=row < num_rows, other=num_tokens)
    first += tl.program_id(1) * TOKENS
    while first < last:
        tokens = first + tl.arange(0, TOKENS)
        inside = tokens < last
        if row == num_rows:
            tl.store(slots + tokens, tl.full([TOKENS], -1, tl.int64), mask=inside)
        else:
            position = tl.load(positions + tokens, mask=inside, other=0).to(tl.int64)
            column = position // (BLOCK_SIZE * SIZE)
            offset = position % (BLOCK_SIZE * SIZE)
            block = tl.load(table + row * table_stride + column, mask=inside, other=0)
            local = offset // (INTERLEAVE * SIZE) * INTERLEAVE + offset % INTERLEAVE
            mine = (offset // INTERLEAVE) % SIZE == RANK
            slot = tl.where(mine, block.to(tl.int64) * BLOCK_SIZE + local, -1)
            tl.store(slots + tokens, slot, mask=inside)
        first += tl.num_programs(1) * TOKENS


@launched
def slot_mapping(
    table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_size: int,
    max_query: int,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map as :func:`hardpoint_runtime.attention.slots.slot_mapping` does."""
    slots = torch.empty_like(positions) if out is None else out
    if len(positions):
        slot_mapping_kernel[(len(table) + 1, triton.cdiv(max(max_query, 1), TOKENS))](
            table, query_start, positions, slots, len(table), len(positions), table.stride(0),
            BLOCK_SIZE=block_size, SIZE=size, RANK=rank, INTERLEAVE=interleave, TOKENS=TOKENS,
            **EXACT,
        )  # fmt: skip
    return slots
