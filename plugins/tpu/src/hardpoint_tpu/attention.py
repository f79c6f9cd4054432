"""Paged attention in plain XLA: for each tile its keys and values through its block table, a chunk
of positions at a time, with a running softmax (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).

N tiles of B tokens; a tile's tokens are consecutive positions of one request, from ``starts`` [N],
of which ``counts`` [N] are real. h heads over k key-value heads of d elements, blocks of s tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 128
"""Positions looked at in one turn."""
GROUP = 4
"""Tiles of prompts that take their turns together, at the least."""
MOST_GROUPS = 4
"""More save little and take longer to compile."""
FLOOR = -1e30
"""A score that counts as none; finite, so that a row without any key gives numbers."""


def table_width(max_model_len: int, block_size: int) -> int:
    """Return the columns of a block table: enough for the longest request, in whole chunks."""
    blocks = -(-max_model_len // block_size)
    step = blocks_per_chunk(block_size)
    return -(-blocks // step) * step


def blocks_per_chunk(block_size: int) -> int:
    """Return how many blocks a chunk spans."""
    return max(1, CHUNK // block_size)


def token_positions(starts: jax.Array, counts: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Return (positions int32 [N, B], bool [N, B]: whether there is such a token)."""
    offsets = jnp.arange(tile, dtype=jnp.int32)
    return starts[:, None] + offsets, offsets < counts[:, None]


def cache_slots(
    tables: jax.Array, starts: jax.Array, counts: jax.Array, tile: int, block_size: int
) -> jax.Array:
    """Return int32 [N * B]: where each token's key and value go, ``block * s + position mod s``;
    what is padding goes to the null block, which belongs to nobody.
    """
    positions, real = token_positions(starts, counts, tile)
    columns = jnp.minimum(positions // block_size, tables.shape[1] - 1)
    blocks = jnp.take_along_axis(tables, columns, axis=1)
    slots = blocks * block_size + positions % block_size
    return jnp.where(real, slots, 0).reshape(-1)


def write_cache(cache: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Return ``cache`` [blocks, s, k, d] with ``values`` [T, k, d] at ``slots`` [T]."""
    flat = cache.reshape(-1, *cache.shape[2:])
    return flat.at[slots].set(values.astype(cache.dtype)).reshape(cache.shape)


def grouped(query: jax.Array, kv_heads: int) -> jax.Array:
    """Bring a query [N, B, h, d] to [N, k, g * B, d], the g heads that share keys together."""
    tiles, tile, heads, size = query.shape
    parted = query.reshape(tiles, tile, kv_heads, heads // kv_heads, size)
    return parted.transpose(0, 2, 3, 1, 4).reshape(tiles, kv_heads, -1, size)


def ungrouped(out: jax.Array, tile: int) -> jax.Array:
    """Bring a result [N, k, g * B, d] back to [N, B, h, d]."""
    tiles, kv_heads, rows, size = out.shape
    parted = out.reshape(tiles, kv_heads, rows // tile, tile, size)
    return parted.transpose(0, 3, 1, 2, 4).reshape(tiles, tile, -1, size)


def attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Return [N, B, h, d] float32: each token of ``query`` [N, B, h, d] (scaled already) attends to
    the positions up to its own, of the caches [blocks, s, k, d] through ``tables`` int32
    [N, columns].

    What is beyond a request's last position is never used, whatever it holds. The number of turns
    is that of the longest request; it is data, not shape. Tiles of prompts are parted into groups
    with turns of their own: neighbours belong to one prompt and end near each other, and XLA on the
    CPU computes the groups side by side.
    """
    tiles, tile = query.shape[:2]
    groups = 1 if tile == 1 else max(1, min(tiles // GROUP, MOST_GROUPS))
    per_tile = (query, tables, starts, counts)
    parts = zip(*(jnp.array_split(each, groups) for each in per_tile), strict=True)
    done = [_attention(part, keys, values, *where) for part, *where in parts]
    return done[0] if groups == 1 else jnp.concatenate(done)


def _attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Return :func:`attention` of the tiles of one group."""
    tiles, tile = query.shape[:2]
    block_size, kv_heads, size = keys.shape[1:]
    step = blocks_per_chunk(block_size)
    length = step * block_size
    rows = grouped(query, kv_heads)
    positions, _ = token_positions(starts, counts, tile)
    ends = starts + counts
    own = jnp.tile(jnp.minimum(positions, ends[:, None] - 1), (1, rows.shape[2] // tile))

    def turn(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, total, out = state
        blocks = lax.dynamic_slice_in_dim(tables, index * step, step, axis=1)
        shape = (tiles, length, kv_heads, size)
        key, value = keys[blocks].reshape(shape), values[blocks].reshape(shape)
        places = index * length + jnp.arange(length, dtype=jnp.int32)
        there = (places < ends[:, None])[:, :, None, None]
        value = jnp.where(there, value, jnp.zeros((), value.dtype))
        scores = _product("nkrd,nckd->nkrc", rows, key)
        seen = places[None, None] <= own[:, :, None]
        scores = jnp.where(seen[:, None], scores, FLOOR)
        peak = jnp.maximum(best, scores.max(-1))
        weights = jnp.exp(scores - peak[..., None])
        kept = jnp.exp(best - peak)
        gained = _product("nkrc,nckd->nkrd", weights.astype(value.dtype), value)
        return peak, total * kept + weights.sum(-1), out * kept[..., None] + gained

    shape = rows.shape[:3]
    turns = -(-jnp.max(ends) // length)
    _, total, out = lax.fori_loop(
        0,
        turns,
        turn,
        (jnp.full(shape, FLOOR), jnp.zeros(shape), jnp.zeros((*shape, size))),
    )
    return ungrouped(out / jnp.maximum(total, 1e-30)[..., None], tile)


def _product(formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(
        formula,
        left,
        right.astype(left.dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
