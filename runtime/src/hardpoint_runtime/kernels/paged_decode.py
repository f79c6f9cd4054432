"""Paged attention of rows with one token each: their caches are cut into parts that programs read
side by side, and the parts are put together (split keys, as in Flash-Decoding; Dao et al., 2023).

Where a cut lies depends on the position alone, so that a row's result does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import FUSED, launched, width
from hardpoint_runtime.kernels.tiles import Operands, walk

PART = 512
"""Positions of a part, in steps whose longest row has no more than MOST_PARTS times as many."""
MOST_PARTS = 32
"""Parts of a row; their unfinished results are kept in memory."""


@triton.jit
def paged_decode_kernel(
    query, key_cache, value_cache, table, query_start, seq_lens, slopes, out,
    scale, softcap, window, query_token, query_head, table_stride, parts, weights, num_parts, part,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    HEAD_V: tl.constexpr, HEAD_PLACES: tl.constexpr, HEAD_V_PLACES: tl.constexpr,
    HEAD_PART: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    SLOPED: tl.constexpr, PARTED: tl.constexpr,
):  # fmt: skip
    """Attend one row's query heads of one key head to one part of its positions."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    low = tl.maximum(tl.maximum(0, length - window), tl.program_id(2) * part)
    high = tl.minimum(length, (tl.program_id(2) + 1) * part)
    if (tl.load(query_start + row + 1) - token == 1) & (low < high):
        group = tl.arange(0, QUERIES)
        head = kv_head * GROUP + group
        real = group < GROUP
        best, weight, sums = walk(
            query, token * query_token + head * query_head, head, real,
            tl.zeros([QUERIES], tl.int32) + (length - 1), low, high,
            key_cache, value_cache, table + row * table_stride, slopes, scale, softcap, window,
            kv_head, False, BLOCK_SIZE, KV_HEADS, HEAD, HEAD_V, HEAD_PLACES, HEAD_V_PLACES,
            HEAD_PART, QUERIES, KEYS, CAPPED, SLOPED,
        )  # fmt: skip
        at_v = tl.arange(0, HEAD_V_PLACES)
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
def paged_decode(operands: Operands, longest: int) -> None:
    """Attend for the rows with one token, which have at most ``longest`` positions."""
    query, out = operands.query, operands.out
    rows, heads, head_v = len(operands.seq_lens), query.shape[1], out.shape[2]
    count, part = num_parts(longest)
    parts, weights = out, out
    if count > 1:
        room = (rows, heads, count)
        parts = torch.empty((*room, head_v), dtype=torch.float32, device=out.device)
        weights = torch.empty((*room, 2), dtype=torch.float32, device=out.device)
    group, places = operands.sizes
    paged_decode_kernel[(rows, heads // group, count)](
        *operands.arguments, parts, weights, count, part, **operands.constants,
        QUERIES=width(group, 16), PARTED=count > 1,
        num_warps=warps(query.dtype, places), num_stages=1, **FUSED,
    )  # fmt: skip
    if count > 1:
        join_parts_kernel[(rows, heads)](
            parts, weights, operands.query_start, operands.seq_lens, out, operands.window, count,
            part, HEADS=heads, HEAD_V=head_v, HEAD_V_PLACES=width(head_v, 16), num_warps=1, **FUSED,
        )  # fmt: skip


def warps(dtype: torch.dtype, places: int) -> int:
    """Return how many warps share a tile: products of float32 take registers for every factor."""
    return (8 if dtype.itemsize > 2 else 4) * (2 if places > 128 else 1)
