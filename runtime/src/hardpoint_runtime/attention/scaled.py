"""Keys and values as int8: behind the numbers of each head of each token stands their scale.

A head of D numbers is D + 4 bytes: the numbers times 127 over the greatest of their magnitudes,
rounded to the nearest, and that greatest over 127, a float32 in the machine's own order. A head
with a number that is not finite has NaN for its scale, and zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheSpec

SCALE_BYTES = 4
"""Behind each head."""
LEAST = 1e-30
"""What is smaller than that everywhere is zero."""


def with_scales(spec: KVCacheSpec) -> KVCacheSpec:
    """Return ``spec`` with room for scales, where its type wants them."""
    if spec.dtype != "int8":
        return spec
    key, value = spec.head_size_k + SCALE_BYTES, spec.head_size_v + SCALE_BYTES
    page = spec.num_kv_heads * spec.block_size * (key + value)
    return evolve(spec, head_size_k=key, head_size_v=value, page_bytes=page)


def head_size(cache: torch.Tensor) -> int:
    """Return how many numbers a head of ``cache`` [..., kv_heads, row] has, of whatever type."""
    row = cache.shape[-1]
    return row - SCALE_BYTES if cache.dtype == torch.int8 else row


def stored(new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values [T, kv_heads, D] as a cache of ``dtype`` has them: [T, kv_heads, row],
    where a row of int8 is D + 4.
    """
    if dtype != torch.int8:
        return new.to(dtype)
    numbers = new.to(torch.float32)
    greatest = numbers.abs().amax(-1, keepdim=True)
    finite = numbers.isfinite().all(-1, keepdim=True)
    good = finite & (greatest > LEAST)
    rounded = torch.where(good, (numbers * (127.0 / greatest)).round(), 0)
    scale = torch.where(good, greatest / 127.0, torch.where(finite, 0.0, torch.nan))
    return torch.cat((rounded.to(torch.int8), scale.contiguous().view(torch.int8)), -1)


def restored(rows: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return cached rows [..., kv_heads * row] as numbers [..., kv_heads * D] of ``dtype``."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    heads = rows.view(*rows.shape[:-1], kv_heads, -1)
    scale = heads[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    numbers = heads[..., :-SCALE_BYTES].to(torch.float32) * scale
    return numbers.flatten(-2).to(dtype)
