"""Paged attention of rows with several tokens each, in tiles (Dao et al., "FlashAttention",
2022): scores are never written to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import FUSED, launched, width
from hardpoint_runtime.kernels.tiles import (
    cache_slots,
    capped,
    keys_at_once,
    load_columns,
    load_rows,
)

QUERIES, QUERIES_OF_FLOATS = 64, 16
"""Queries of a tile, and of one in float32: the query heads of one key head, for as many tokens as
there is room for.
"""
WARPS = 8


@triton.jit
def paged_prefill_kernel(
    query, key_cache, value_cache, table, query_start, seq_lens, slopes, out,
    scale, softcap, window, query_token, query_head, table_stride,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, HEAD_V: tl.constexpr, HEAD_PLACES: tl.constexpr,
    HEAD_V_PLACES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr,
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
        own = length - count + offset
        at, at_v = tl.arange(0, HEAD_PLACES), tl.arange(0, HEAD_V_PLACES)
        rows = (first + offset) * query_token + head * query_head
        asked = load_rows(query, rows, real, at, HEAD, HEAD_PLACES)
        if SLOPED:
            slope = tl.load(slopes + head, mask=real, other=0.0).to(tl.float32)
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        weight = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, HEAD_V_PLACES], tl.float32)
        low = tl.maximum(0, length - count + tile - window + 1)
        high = tl.minimum(length, length - count + tile + tokens)
        for start in range(low, high, KEYS):
            position = start + tl.arange(0, KEYS)
            written = position < high
            slot = cache_slots(table + row * table_stride, position, written, BLOCK_SIZE)
            slot = slot * KV_HEADS + kv_head
            key = load_columns(key_cache, slot * HEAD, written, at, HEAD, HEAD_PLACES)
            score = tl.dot(asked, key.to(asked.dtype), input_precision="ieee") * scale
            if CAPPED:
                score = capped(score, softcap)
            if SLOPED:
                score += slope[:, None] * (position[None, :] - own[:, None]).to(tl.float32)
            seen = (position[None, :] <= own[:, None]) & (position[None, :] > own[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            top = tl.maximum(best, tl.max(score, 1))
            # A query that has seen nothing so far has no best score to compare with.
            base = tl.where(top == float("-inf"), 0.0, top)
            kept = tl.exp(best - base)
            shares = tl.exp(score - base[:, None])
            value = load_rows(value_cache, slot * HEAD_V, written, at_v, HEAD_V, HEAD_V_PLACES)
            weight = weight * kept + tl.sum(shares, 1)
            sums = sums * kept[:, None]
            sums += tl.dot(shares.to(asked.dtype), value.to(asked.dtype), input_precision="ieee")
            best = top
        target = ((first + offset) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_V + at_v[None, :]
        result = sums / tl.where(real, weight, 1.0)[:, None]
        mask = real[:, None] & (at_v < HEAD_V)[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


@launched
def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    slopes: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int,
    max_query: int,
) -> None:
    """Attend for the rows with several tokens, up to ``max_query``; ``out`` of others stays as it
    is. Shapes as in :func:`hardpoint_runtime.kernels.paged_decode.paged_decode`.
    """
    _, heads, head = query.shape
    _, block_size, kv_heads, head_v = value_cache.shape
    group = heads // kv_heads
    queries = queries_at_once(query.dtype, group)
    paged_prefill_kernel[(triton.cdiv(max_query, queries // group), kv_heads, len(seq_lens))](
        query, key_cache, value_cache, table, query_start, seq_lens,
        seq_lens if slopes is None else slopes, out,
        scale, 1.0 if softcap is None else softcap, window,
        query.stride(0), query.stride(1), table.stride(0),
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, HEAD=head, HEAD_V=head_v,
        HEAD_PLACES=width(head, 16), HEAD_V_PLACES=width(head_v, 16), QUERIES=queries,
        KEYS=keys_at_once(query.dtype, head, head_v), CAPPED=softcap is not None,
        SLOPED=slopes is not None,
        num_warps=WARPS, num_stages=1, **FUSED,
    )  # fmt: skip


def queries_at_once(dtype: torch.dtype, group: int) -> int:
    """Return the queries of a tile, of query heads of which ``group`` share a key head."""
    return max(width(group), QUERIES if dtype.itemsize <= 2 else QUERIES_OF_FLOATS)
