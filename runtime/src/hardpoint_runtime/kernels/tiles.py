"""What the attention kernels have in common: their operands, and the walk of some queries of one
row along its cached keys, scores never leaving registers (Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import width

TILE_BYTES = 1 << 13
"""Bytes of the keys, or of the values, that a program holds at once."""
WHOLE_HEAD, PART_BYTES = 128, 128
"""Of heads larger than the first, as many numbers as the second is bytes are multiplied at a time;
queries are read again, not kept.
"""


class Operands(NamedTuple):
    """What both kernels are given; a tuple, as recordings of graphs look for tensors in them.

    ``query`` [T, heads, head], the caches [blocks, block_size, kv_heads, head], ``slopes`` [heads]
    and ``out`` [T, heads, head_v] as in :func:`hardpoint_runtime.attention.paged.attention`, the
    rest as in :class:`hardpoint_runtime.attention.metadata.AttentionMetadata`. Rows that a kernel
    is not for stay as they are in ``out``.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slopes: torch.Tensor | None
    out: torch.Tensor
    scale: float
    softcap: float | None
    window: int

    @property
    def sizes(self) -> tuple[int, int]:
        """How many query heads share a key head, and the greater size of a head's tile."""
        heads, head = self.query.shape[1:]
        kv_heads, head_v = self.value_cache.shape[2:]
        return heads // kv_heads, width(max(head, head_v), 16)

    @property
    def arguments(self) -> tuple[object, ...]:
        """The first arguments of a launch, in the kernels' order."""
        return (
            *self[:6],
            self.seq_lens if self.slopes is None else self.slopes,
            self.out,
            self.scale,
            1.0 if self.softcap is None else self.softcap,
            self.window,
            self.query.stride(0),
            self.query.stride(1),
            self.table.stride(0),
        )

    @property
    def constants(self) -> dict[str, int]:
        """What a launch is compiled for."""
        _, block_size, kv_heads, head_v = self.value_cache.shape
        head = self.query.shape[2]
        return {
            "BLOCK_SIZE": block_size,
            "KV_HEADS": kv_heads,
            "GROUP": self.sizes[0],
            "HEAD": head,
            "HEAD_V": head_v,
            "HEAD_PLACES": width(head, 16),
            "HEAD_PART": part_of(self.query.dtype, width(head, 16)),
            "HEAD_V_PLACES": width(head_v, 16),
            "KEYS": keys_at_once(self.query.dtype, self.sizes[1]),
            "CAPPED": self.softcap is not None,
            "SLOPED": self.slopes is not None,
        }


def keys_at_once(dtype: torch.dtype, places: int) -> int:
    """Return how many keys a program takes at once, so that registers hold them everywhere."""
    return max(16, min(32, TILE_BYTES // dtype.itemsize // places))


def part_of(dtype: torch.dtype, places: int) -> int:
    """Return how much of a head's tile is multiplied at a time."""
    return places if places <= WHOLE_HEAD else PART_BYTES // dtype.itemsize


@triton.jit
def walk(
    query, rows, heads, real, own, low, high,
    key_cache, value_cache, row_table, slopes, scale, softcap, window, kv_head,
    CAUSAL: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    HEAD_V: tl.constexpr, HEAD_PLACES: tl.constexpr, HEAD_V_PLACES: tl.constexpr,
    HEAD_PART: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
):  # fmt: skip
    """Attend queries of one row to its positions from ``low`` to ``high``; return the best score of
    each, the weight of all, and the weighted sum of the values.

    The queries [QUERIES] are ``real``, start at ``rows``, are of query ``heads`` and at the
    positions ``own``. Unless it is CAUSAL, each may see all of the positions, and there are some.
    """
    at, at_v = tl.arange(0, HEAD_PLACES), tl.arange(0, HEAD_V_PLACES)
    if HEAD_PART == HEAD_PLACES:
        asked = load_rows(query, rows, real, at, HEAD, HEAD_PLACES)
    if SLOPED:
        slope = tl.load(slopes + heads, mask=real, other=0.0).to(tl.float32)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, HEAD_V_PLACES], tl.float32)
    kind: tl.constexpr = query.dtype.element_ty
    for start in range(low, high, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < high
        block = tl.load(row_table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head
        if HEAD_PART == HEAD_PLACES:
            key = load_columns(key_cache, slot * HEAD, inside, at, HEAD, HEAD_PLACES)
            score = tl.dot(asked, key.to(kind), input_precision="ieee")
        else:
            score = tl.zeros([QUERIES, KEYS], tl.float32)
            for first in range(0, HEAD_PLACES, HEAD_PART):
                some = first + tl.arange(0, HEAD_PART)
                part = load_rows(query, rows, real, some, HEAD, HEAD_PART)
                key = load_columns(key_cache, slot * HEAD, inside, some, HEAD, HEAD_PART)
                score = tl.dot(part, key.to(kind), score, input_precision="ieee")
        score *= scale
        if CAPPED:
            score = capped(score, softcap)
        if SLOPED:
            score += slope[:, None] * (position[None, :] - own[:, None]).to(tl.float32)
        if CAUSAL:
            seen = (position[None, :] <= own[:, None]) & (position[None, :] > own[:, None] - window)
        else:
            seen = inside[None, :]
        score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        base = top
        if CAUSAL:  # a query that has seen nothing so far has no best score to compare with
            base = tl.where(top == float("-inf"), 0.0, top)
        kept = tl.exp(best - base)
        shares = tl.exp(score - base[:, None])
        value = load_rows(value_cache, slot * HEAD_V, inside, at_v, HEAD_V, HEAD_V_PLACES)
        weight = weight * kept + tl.sum(shares, 1)
        sums = sums * kept[:, None]
        sums += tl.dot(shares.to(kind), value.to(kind), input_precision="ieee")
        best = top
    return best, weight, sums


@triton.jit
def load_rows(start, rows, real, at, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Return [rows, PLACES]: numbers from ``start + rows`` on, 0 for rows that are not real and
    from SIZE on.
    """
    mask = real[:, None] if SIZE % PLACES == 0 else real[:, None] & (at < SIZE)[None, :]
    return tl.load(start + rows[:, None] + at[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(start, columns, real, at, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Return the same turned, [PLACES, columns], as a matrix product takes its second factor."""
    mask = real[None, :] if SIZE % PLACES == 0 else real[None, :] & (at < SIZE)[:, None]
    return tl.load(start + columns[None, :] + at[:, None], mask=mask, other=0.0)


@triton.jit
def capped(score, softcap):
    """Return ``softcap * tanh(score / softcap)``: tanh from exp of what is never above 0."""
    shrunk = tl.exp(-2 * tl.abs(score) / softcap)
    cap = (1 - shrunk) / (1 + shrunk) * softcap
    return tl.where(score < 0, -cap, cap)
