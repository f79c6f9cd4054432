"""What the attention kernels have in common: where keys lie, how scores are capped."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import width

TILE_BYTES = 1 << 13
"""Bytes of the keys, or of the values, that a program holds at once."""


@triton.jit
def cache_slots(row_table, position, seen, BLOCK_SIZE: tl.constexpr):
    """Return where the positions of a row are cached, int64."""
    block = tl.load(row_table + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def load_rows(start, rows, real, at, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Return [rows, PLACES]: SIZE numbers from ``start + rows`` on, 0 for rows that are not real
    and beyond.
    """
    mask = real[:, None] if SIZE == PLACES else real[:, None] & (at < SIZE)[None, :]
    return tl.load(start + rows[:, None] + at[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(start, columns, real, at, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Return the same turned, [PLACES, columns], as a matrix product takes its second factor."""
    mask = real[None, :] if SIZE == PLACES else real[None, :] & (at < SIZE)[:, None]
    return tl.load(start + columns[None, :] + at[:, None], mask=mask, other=0.0)


@triton.jit
def capped(score, softcap):
    """Return ``softcap * tanh(score / softcap)``: tanh from exp of what is never above 0."""
    shrunk = tl.exp(-2 * tl.abs(score) / softcap)
    cap = (1 - shrunk) / (1 + shrunk) * softcap
    return tl.where(score < 0, -cap, cap)


def keys_at_once(dtype: torch.dtype, head: int, head_v: int) -> int:
    """Return how many keys a program takes at once, so that registers hold them everywhere."""
    numbers = TILE_BYTES // dtype.itemsize
    return max(16, min(32, numbers // width(max(head, head_v), 16)))
