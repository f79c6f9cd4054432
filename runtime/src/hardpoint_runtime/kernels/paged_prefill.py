"""Paged attention of rows with several tokens each, in tiles of queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import FUSED, launched, width
from hardpoint_runtime.kernels.tiles import Operands, walk

QUERIES, QUERIES_OF_FLOATS = 64, 16
"""Queries of a tile, and of one in float32: the query heads of one key head, for as many tokens as
there is room for.
"""


@triton.jit
def paged_prefill_kernel(
    query, key_cache, value_cache, table, query_start, seq_lens, slopes, out,
    scale, softcap, window, query_token, query_head, table_stride,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    HEAD_V: tl.constexpr, HEAD_PLACES: tl.constexpr, HEAD_V_PLACES: tl.constexpr,
    HEAD_PART: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
):  # fmt: skip
    """Attend the query heads of one key head, of some tokens of one row."""
    tokens: tl.constexpr = QUERIES // GROUP
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - first).to(tl.int32)
    tile = tl.program_id(0) * tokens
    if (count > 1) & (tile < count):
        length = tl.load(seq_lens + row)
        place = tl.arange(0, QUERIES)
        offset = tile + place // GROUP
        head = kv_head * GROUP + place % GROUP
        real = (place < tokens * GROUP) & (offset < count)
        _, weight, sums = walk(
            query, (first + offset) * query_token + head * query_head, head, real,
            length - count + offset,
            tl.maximum(0, length - count + tile - window + 1),
            tl.minimum(length, length - count + tile + tokens),
            key_cache, value_cache, table + row * table_stride, slopes, scale, softcap, window,
            kv_head, True, BLOCK_SIZE, KV_HEADS, HEAD, HEAD_V, HEAD_PLACES, HEAD_V_PLACES,
            HEAD_PART, QUERIES, KEYS, CAPPED, SLOPED,
        )  # fmt: skip
        at_v = tl.arange(0, HEAD_V_PLACES)
        target = ((first + offset) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_V + at_v[None, :]
        result = sums / tl.where(real, weight, 1.0)[:, None]
        mask = real[:, None] & (at_v < HEAD_V)[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


@launched
def paged_prefill(operands: Operands, max_query: int) -> None:
    """Attend for the rows with several tokens, up to ``max_query``."""
    group, places = operands.sizes
    queries = queries_at_once(operands.query.dtype, group, places)
    kv_heads, rows = operands.query.shape[1] // group, len(operands.seq_lens)
    paged_prefill_kernel[(triton.cdiv(max_query, queries // group), kv_heads, rows)](
        *operands.arguments, **operands.constants, QUERIES=queries,
        num_warps=warps(operands.query.dtype, places), num_stages=1, **FUSED,
    )  # fmt: skip


def queries_at_once(dtype: torch.dtype, group: int, places: int) -> int:
    """Return the queries of a tile, of query heads of which ``group`` share a key head."""
    most = QUERIES if places <= 128 else QUERIES // 2
    return max(width(group), most if dtype.itemsize <= 2 else QUERIES_OF_FLOATS)


def warps(dtype: torch.dtype, places: int) -> int:
    """Return how many warps share a tile: products of float32 take registers for every factor."""
    return 16 if dtype.itemsize > 2 and places <= 128 else 8
