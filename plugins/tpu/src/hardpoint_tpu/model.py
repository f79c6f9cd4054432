"""The Llama decoder as pure functions, run on each device of the mesh over that device's shards.

T tokens in N tiles of B, H hidden size. Linear weights are (outputs, inputs), as in checkpoints.
``axis`` names the mesh axis over which a layer's parts are summed: after the attention's and the
MLP's last product, and after the lookup of the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from attrs import frozen
from jax import lax

from hardpoint_tpu.attention import cache_slots, token_positions, write_cache
from hardpoint_tpu.shape import ModelShape

AXIS = "tensor"
Params = Mapping[str, jax.Array]
Cache = tuple[jax.Array, jax.Array]
"""One layer's keys and values, each [blocks, block size, key-value heads, head size]."""
Attention = Callable[..., jax.Array]
"""As :func:`hardpoint_tpu.attention.attention`."""


@frozen(kw_only=True)
class TileBatch:
    """Where the tiles of a step are: ``tables`` int32 [N, columns], ``starts`` and ``counts`` int32
    [N].
    """

    tables: jax.Array
    starts: jax.Array
    counts: jax.Array


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return x [T, i] times ``weight`` [o, i] transposed, in x's type, summed in float32."""
    product = lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product.astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return x [T, H] over its root mean square, times ``weight`` (Zhang and Sennrich, 2019)."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight


def embed(table: jax.Array, token_ids: jax.Array, devices: int) -> jax.Array:
    """Return [T, H] of ``token_ids`` [T] from this device's rows of the embedding."""
    if devices == 1:
        return table[token_ids]
    rows = table.shape[0]
    local = token_ids - lax.axis_index(AXIS) * rows
    mine = (local >= 0) & (local < rows)
    found = jnp.where(mine[:, None], table[jnp.clip(local, 0, rows - 1)], 0)
    return lax.psum(found, AXIS)


def angles(shape: ModelShape, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (cos, sin) float32 [T, 1, head] for ``positions`` [T]: pair i turns by position /
    theta ** (2 i / head), the halves of a head being its pairs (Su et al., 2021).
    """
    exponents = jnp.arange(0, shape.head, 2, dtype=jnp.float32) / shape.head
    turned = positions[:, None, None].astype(jnp.float32) * (1.0 / shape.theta**exponents)
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    return jnp.concatenate((cos, cos), -1), jnp.concatenate((-sin, sin), -1)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs of x [T, heads, head]."""
    wide = x.astype(jnp.float32)
    half = x.shape[-1] // 2
    swapped = jnp.concatenate((wide[..., half:], wide[..., :half]), -1)
    return (wide * cos + swapped * sin).astype(x.dtype)


def layer(
    shape: ModelShape,
    attend: Attention,
    params: Params,
    cache: Cache,
    x: jax.Array,
    turned: tuple[jax.Array, jax.Array],
    batch: TileBatch,
) -> tuple[jax.Array, Cache]:
    """Return (x [T, H] after one decoder layer, its cache with this step's keys and values)."""
    mixed, cache = _attention(shape, attend, params, cache, x, turned, batch)
    x = x + _summed(mixed, shape, params.get("out_bias"))
    normed = rms_norm(x, params["post_norm"], shape.eps)
    both = linear(normed, params["gate_up"])
    if "gate_up_bias" in params:
        both = both + params["gate_up_bias"]
    gate, up = jnp.split(both, 2, axis=1)
    inner = jax.nn.silu(gate.astype(jnp.float32)).astype(up.dtype) * up
    return x + _summed(linear(inner, params["down"]), shape, params.get("down_bias")), cache


def _attention(
    shape: ModelShape,
    attend: Attention,
    params: Params,
    cache: Cache,
    x: jax.Array,
    turned: tuple[jax.Array, jax.Array],
    batch: TileBatch,
) -> tuple[jax.Array, Cache]:
    heads, kv_heads, size = shape.layout.query_heads, shape.layout.kv_heads, shape.head
    tiles = batch.starts.shape[0]
    tile, block_size = x.shape[0] // tiles, cache[0].shape[1]
    qkv = linear(rms_norm(x, params["input_norm"], shape.eps), params["qkv"])
    if "qkv_bias" in params:
        qkv = qkv + params["qkv_bias"]
    qkv = qkv.reshape(-1, heads + 2 * kv_heads, size)
    query_key = rotate(qkv[:, : heads + kv_heads], *turned)
    slots = cache_slots(batch.tables, batch.starts, batch.counts, tile, block_size)
    keys = write_cache(cache[0], slots, query_key[:, heads:])
    values = write_cache(cache[1], slots, qkv[:, heads + kv_heads :])
    scaled = (query_key[:, :heads].astype(jnp.float32) * size**-0.5).astype(x.dtype)
    query = scaled.reshape(tiles, tile, heads, size)
    out = attend(query, keys, values, batch.tables, batch.starts, batch.counts)
    out = out.reshape(-1, heads * size).astype(x.dtype)
    return linear(out, params["out"]), (keys, values)


def _summed(part: jax.Array, shape: ModelShape, bias: jax.Array | None) -> jax.Array:
    """Return the sum of all devices' parts, plus the bias, once."""
    whole = part if shape.devices == 1 else lax.psum(part, AXIS)
    return whole if bias is None else whole + bias


def embed_step(
    shape: ModelShape, table: jax.Array, token_ids: jax.Array, starts: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (x [T, H], cos, sin) of ``token_ids`` [T]."""
    positions, _ = token_positions(starts, counts, token_ids.shape[0] // starts.shape[0])
    return (embed(table, token_ids, shape.devices), *angles(shape, positions.reshape(-1)))


def layers_step(
    shape: ModelShape,
    attend: Attention,
    params: Sequence[Params],
    caches: Sequence[Cache],
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, list[Cache]]:
    """Return (x after the layers of ``params``, their caches)."""
    batch = TileBatch(tables=tables, starts=starts, counts=counts)
    written = []
    for each, cache in zip(params, caches, strict=True):
        x, new = layer(shape, attend, each, cache, x, (cos, sin), batch)
        written.append(new)
    return x, written


def select_step(shape: ModelShape, norm: jax.Array, x: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the normed hidden states [R, H] of ``rows`` [R] of x."""
    return rms_norm(x[rows], norm, shape.eps)


def logits_step(shape: ModelShape, head: jax.Array, hidden: jax.Array) -> jax.Array:
    """Return float32 logits [R, V] of ``hidden`` [R, H]: every device's part of the vocabulary."""
    part = lax.dot_general(
        hidden,
        head,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if shape.devices > 1:
        part = lax.all_gather(part, AXIS, axis=1, tiled=True)
    return part[:, : shape.vocabulary]
