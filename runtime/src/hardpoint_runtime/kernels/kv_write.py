"""The operation ``kv_write``: keys and values of a step into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.graphs.resolution import AttentionSupport
from hardpoint_runtime.graphs.support import graph_support
from hardpoint_runtime.kernels.launches import EXACT, launched, rows_of, width

NUMBERS = 1024
"""Numbers of a token that a program writes at once."""


@triton.jit
def kv_write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_V: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Write a part of one token's KEYS and VALUES numbers, all heads in a row in the cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        place = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
        source = token * key_token + place // HEAD * key_head + place % HEAD
        new = tl.load(key + source, mask=place < KEYS)
        target = key_cache + slot * KEYS + place
        tl.store(target, new.to(key_cache.dtype.element_ty), mask=place < KEYS)
        source = token * value_token + place // HEAD_V * value_head + place % HEAD_V
        new = tl.load(value + source, mask=place < VALUES)
        target = value_cache + slot * VALUES + place
        tl.store(target, new.to(value_cache.dtype.element_ty), mask=place < VALUES)


@graph_support(AttentionSupport.ALWAYS)
def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Write as :func:`hardpoint_runtime.attention.paged.kv_write` does; padding writes nothing."""
    if len(key):
        _write(key, value, key_cache, value_cache, metadata.slots)


@launched
def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    tokens, kv_heads, head = key.shape
    keys, values = kv_heads * head, kv_heads * value.shape[2]
    key, value = rows_of(key), rows_of(value)
    numbers = min(NUMBERS, width(max(keys, values)))
    kv_write_kernel[(tokens, triton.cdiv(max(keys, values), numbers))](
        key, value, key_cache, value_cache, slots,
        *key.stride()[:2], *value.stride()[:2],
        KEYS=keys, VALUES=values, HEAD=head, HEAD_V=value.shape[2], NUMBERS=numbers,
        **EXACT,
    )  # fmt: skip
