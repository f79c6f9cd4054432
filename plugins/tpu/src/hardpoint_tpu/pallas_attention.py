"""Paged attention as a Pallas kernel: blocks are fetched by the block table, one a grid step.

The same computation as :mod:`hardpoint_tpu.attention`, for one tile and one block at a time. Block
tables, starts and counts come as scalars ahead of the grid, so that the next block is on its way
while one is computed. Beyond a tile's last block the index stays, and nothing is fetched.

Tested interpreted, and lowered for TPUs by ``jax.export``; never run on a TPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hardpoint_tpu.attention import FLOOR, grouped, ungrouped

LANES = 128
"""Width of a vector register of a TPU: running sums are kept in all lanes alike."""


def pallas_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return what :func:`hardpoint_tpu.attention.attention` returns, of the same arguments."""
    tiles, tile = query.shape[:2]
    _, block_size, kv_heads, size = keys.shape
    rows = grouped(query, kv_heads)
    width = tables.shape[1]

    def block_of(
        n: Any, j: Any, tables: Any, starts: Any, counts: Any
    ) -> tuple[Any, int, int, int]:
        last = lax.div(jnp.maximum(starts[n] + counts[n] - 1, 0), block_size)
        return tables[n * width + jnp.minimum(j, last)], 0, 0, 0

    def tile_of(n: jax.Array, j: jax.Array, *scalars: jax.Array) -> tuple[jax.Array, int, int, int]:
        return n, 0, 0, 0

    cache_spec = pl.BlockSpec((1, block_size, kv_heads, size), block_of)
    row_spec = pl.BlockSpec((1, *rows.shape[1:]), tile_of)
    sums = pltpu.VMEM((kv_heads, rows.shape[2], LANES), jnp.float32)
    call = pl.pallas_call(
        partial(_kernel, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tiles, width),
            in_specs=[row_spec, cache_spec, cache_spec],
            out_specs=row_spec,
            scratch_shapes=[sums, sums, pltpu.VMEM(rows.shape[1:], jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        interpret=interpret,
    )
    out = call(tables.reshape(-1), starts, counts, rows, keys, values)
    return ungrouped(out, tile)


def _kernel(
    tables: Any,
    starts: Any,
    counts: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    best: Any,
    total: Any,
    sums: Any,
    *,
    tile: int,
) -> None:
    """One block of one tile. References: query and out [1, k, r, d], key and value [1, s, k, d];
    scratch kept over a tile's blocks: best and total [k, r, lanes], sums [k, r, d].
    """
    n, j = pl.program_id(0), pl.program_id(1)
    block_size, kv_heads = key.shape[1:3]
    rows = query.shape[2]
    end = starts[n] + counts[n]

    @pl.when(j == 0)
    def _begin() -> None:
        best[...] = jnp.full(best.shape, FLOOR, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(j * block_size < end)
    def _add() -> None:
        shape = (rows, block_size)
        places = j * block_size + lax.broadcasted_iota(jnp.int32, shape, 1)
        own = starts[n] + lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), tile)
        own = jnp.minimum(own, end - 1)
        there = j * block_size + lax.broadcasted_iota(jnp.int32, (block_size, 1), 0) < end
        for head in range(kv_heads):
            scores = _dot(query[0, head], key[0, :, head, :], 1)
            scores = jnp.where(places <= own, scores, FLOOR)
            before = best[head, :, :1]
            peak = jnp.maximum(before, scores.max(-1, keepdims=True))
            weights = jnp.exp(scores - peak)
            kept = jnp.exp(before - peak)
            held = value[0, :, head, :]
            held = jnp.where(there, held, jnp.zeros((), held.dtype))
            gained = _dot(weights.astype(held.dtype), held, 0)
            grown = total[head, :, :1] * kept + weights.sum(-1, keepdims=True)
            sums[head] = sums[head] * kept + gained
            best[head] = jnp.broadcast_to(peak, best.shape[1:])
            total[head] = jnp.broadcast_to(grown, total.shape[1:])

    @pl.when(j == pl.num_programs(1) - 1)
    def _end() -> None:
        for head in range(kv_heads):
            out[0, head] = sums[head] / jnp.maximum(total[head, :, :1], 1e-30)


def _dot(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    return lax.dot_general(
        left,
        right.astype(left.dtype),
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
