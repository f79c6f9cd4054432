"""Paged attention of rows with one token each: their caches are cut into parts that programs read
side by side, and the parts are put together (split keys, as in Flash-Decoding; Dao et al., 2023).

Where a cut lies depends on the position alone, so that a row's result does not depend on the batch.
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

PART = 512
"""Positions of a part, in steps whose longest row has no more than MOST_PARTS times as many."""
MOST_PARTS = 32
"""Parts of a row; their unfinished results are kept in memory."""


@triton.jit
def paged_decode_kernel(
    query, key_cache, value_cache, table, query_start, seq_lens, slopes, out, parts, weights,
    scale, softcap, window, query_token, query_head, table_stride, num_parts, part,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, HEAD_V: tl.constexpr, GROUP_PLACES: tl.constexpr,
    HEAD_PLACES: tl.constexpr, HEAD_V_PLACES: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, PARTED: tl.constexpr,
):  # fmt: skip
    """Attend one row's query heads of one key head to one part of its positions."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    low = tl.maximum(tl.maximum(0, length - window), tl.program_id(2) * part)
    high = tl.minimum(length, (tl.program_id(2) + 1) * part)
    if (tl.load(query_start + row + 1) - token == 1) & (low < high):
        group = tl.arange(0, GROUP_PLACES)
        head = kv_head * GROUP + group
        real = group < GROUP
        at, at_v = tl.arange(0, HEAD_PLACES), tl.arange(0, HEAD_V_PLACES)
        query += token * query_token
        asked = load_rows(query, head * query_head, real, at, HEAD, HEAD_PLACES)
        if SLOPED:
            slope = tl.load(slopes + head, mask=real, other=0.0).to(tl.float32)
        best = tl.full([GROUP_PLACES], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP_PLACES], tl.float32)
        sums = tl.zeros([GROUP_PLACES, HEAD_V_PLACES], tl.float32)
        for start in range(low, high, KEYS):
            position = start + tl.arange(0, KEYS)
            seen = position < high
            slot = cache_slots(table + row * table_stride, position, seen, BLOCK_SIZE)
            slot = slot * KV_HEADS + kv_head
            key = load_columns(key_cache, slot * HEAD, seen, at, HEAD, HEAD_PLACES)
            score = tl.dot(asked, key.to(asked.dtype), input_precision="ieee") * scale
            if CAPPED:
                score = capped(score, softcap)
            if SLOPED:
                score += slope[:, None] * (position - (length - 1))[None, :].to(tl.float32)
            score = tl.where(seen[None, :], score, float("-inf"))
            top = tl.maximum(best, tl.max(score, 1))
            kept = tl.exp(best - top)
            shares = tl.exp(score - top[:, None])
            value = load_rows(value_cache, slot * HEAD_V, seen, at_v, HEAD_V, HEAD_V_PLACES)
            weight = weight * kept + tl.sum(shares, 1)
            sums = sums * kept[:, None]
            sums += tl.dot(shares.to(asked.dtype), value.to(asked.dtype), input_precision="ieee")
            best = top
        written = real[:, None] & (at_v < HEAD_V)[None, :]
        if PARTED:
            place = (row * (KV_HEADS * GROUP) + head) * num_parts + tl.program_id(2)
            tl.store(parts + place[:, None] * HEAD_V + at_v[None, :], sums, mask=written)
            tl.store(weights + place * 2, best, mask=real)
            tl.store(weights + place * 2 + 1, weight, mask=real)
        else:
            place = token * (KV_HEADS * GROUP) + head
            target = out + place[:, None] * HEAD_V + at_v[None, :]
            tl.store(target, (sums / weight[:, None]).to(out.dtype.element_ty), mask=written)


@triton.jit
def join_parts_kernel(
    parts,
    weights,
    query_start,
    seq_lens,
    out,
    window,
    num_parts,
    part,
    HEADS: tl.constexpr,
    HEAD_V: tl.constexpr,
    HEAD_V_PLACES: tl.constexpr,
):
    """Put the parts of one row's head together, in order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    if (tl.load(query_start + row + 1) - token == 1) & (length > 0):
        at_v = tl.arange(0, HEAD_V_PLACES)
        place = (row * HEADS + head) * num_parts
        best = float("-inf")
        weight = 0.0
        sums = tl.zeros([HEAD_V_PLACES], tl.float32)
        for index in range(tl.maximum(0, length - window) // part, tl.cdiv(length, part)):
            their_best = tl.load(weights + (place + index) * 2)
            top = tl.maximum(best, their_best)
            kept, theirs = tl.exp(best - top), tl.exp(their_best - top)
            their_sums = tl.load(
                parts + (place + index) * HEAD_V + at_v, mask=at_v < HEAD_V, other=0.0
            )
            weight = weight * kept + tl.load(weights + (place + index) * 2 + 1) * theirs
            sums = sums * kept + their_sums * theirs
            best = top
        target = out + (token * HEADS + head) * HEAD_V + at_v
        tl.store(target, (sums / weight).to(out.dtype.element_ty), mask=at_v < HEAD_V)


def num_parts(longest: int) -> tuple[int, int]:
    """Return into how many parts rows of up to ``longest`` positions are cut, and their size."""
    part = PART * max(1, triton.cdiv(longest, PART * MOST_PARTS))
    return triton.cdiv(max(longest, 1), part), part


@launched
def paged_decode(
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
    longest: int,
) -> None:
    """Attend for the rows with one token; ``out`` [T, heads, head_v] of others stays as it is.

    Shapes as in :class:`hardpoint_runtime.attention.metadata.AttentionMetadata` and
    :func:`hardpoint_runtime.attention.paged.attention`; rows have at most ``longest`` positions.
    """
    _, heads, head = query.shape
    _, block_size, kv_heads, head_v = value_cache.shape
    count, part = num_parts(longest)
    parted = count > 1
    parts, weights = out, out
    if parted:
        room = (len(seq_lens), heads, count)
        parts = torch.empty((*room, head_v), dtype=torch.float32, device=out.device)
        weights = torch.empty((*room, 2), dtype=torch.float32, device=out.device)
    paged_decode_kernel[(len(seq_lens), kv_heads, count)](
        query, key_cache, value_cache, table, query_start, seq_lens,
        seq_lens if slopes is None else slopes, out, parts, weights,
        scale, 1.0 if softcap is None else softcap, window,
        query.stride(0), query.stride(1), table.stride(0), count, part,
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD=head, HEAD_V=head_v,
        GROUP_PLACES=width(heads // kv_heads, 16), HEAD_PLACES=width(head, 16),
        HEAD_V_PLACES=width(head_v, 16), KEYS=keys_at_once(query.dtype, head, head_v),
        CAPPED=softcap is not None, SLOPED=slopes is not None, PARTED=parted,
        num_warps=warps(query.dtype), num_stages=1, **FUSED,
    )  # fmt: skip
    if parted:
        join_parts_kernel[(len(seq_lens), heads)](
            parts, weights, query_start, seq_lens, out, window, count, part,
            HEADS=heads, HEAD_V=head_v, HEAD_V_PLACES=width(head_v, 16), num_warps=1, **FUSED,
        )  # fmt: skip


def warps(dtype: torch.dtype) -> int:
    """Return how many warps share a tile: products of float32 take registers for every factor."""
    return 8 if dtype.itemsize > 2 else 4
