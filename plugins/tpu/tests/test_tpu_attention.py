"""Paged attention, plain and as a kernel, against dense attention; the kernel lowered for TPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hardpoint_tpu.attention import attention, blocks_per_chunk, table_width
from hardpoint_tpu.pallas_attention import pallas_attention

HEADS, KV, SIZE = 6, 3, 16


def case(seed: int, *, tiles: int, tile: int, block_size: int, longest: int, dtype=np.float32):
    """Tiles of random requests over a cache whose unused places are NaN, and dense results."""
    rng = np.random.default_rng(seed)
    width = table_width(longest, block_size)
    blocks = tiles * width + 1
    cache = np.full((2, blocks, block_size, KV, SIZE), np.nan, np.float32)
    tables = rng.permutation(np.arange(1, blocks)).reshape(tiles, width).astype(np.int32)
    starts = rng.integers(0, longest - tile, tiles).astype(np.int32)
    counts = rng.integers(1, tile + 1, tiles).astype(np.int32)
    counts[-1] = 0 if tiles > 2 else counts[-1]
    query = rng.standard_normal((tiles, tile, HEADS, SIZE), dtype=np.float32)
    expected = np.zeros_like(query)
    for n in range(tiles):
        end = int(starts[n] + counts[n])
        held = rng.standard_normal((2, end, KV, SIZE), dtype=np.float32)
        for position in range(end):
            place = tables[n, position // block_size], position % block_size
            cache[(slice(None), *place)] = held[:, position]
        for b in range(counts[n]):
            seen = starts[n] + b + 1
            keys, values = (part[:seen].repeat(HEADS // KV, 1) for part in held)
            scores = np.einsum("hd,khd->hk", query[n, b], keys)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected[n, b] = np.einsum("hk,khd->hd", weights, values)
    arguments = (query, cache[0], cache[1], tables, starts, counts)
    real = np.arange(tile) < counts[:, None]
    return tuple(jnp.asarray(each) for each in arguments), expected, real


def close(found, expected, real) -> None:
    assert np.isfinite(np.asarray(found)).all()
    np.testing.assert_allclose(np.asarray(found)[real], expected[real], atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 128])
def test_the_plain_form_is_dense_attention(block_size):
    run = jax.jit(attention)
    for seed, (tiles, tile) in enumerate([(5, 1), (3, 16)]):
        given, expected, real = case(
            seed, tiles=tiles, tile=tile, block_size=block_size, longest=300
        )
        close(run(*given), expected, real)


@pytest.mark.parametrize(
    ("tiles", "tile", "groups"), [(7, 16, 1), (9, 16, 2), (17, 16, 4), (5, 1, 1)]
)
def test_groups_of_tiles_take_turns_of_their_own(tiles, tile, groups):
    given, expected, real = case(2, tiles=tiles, tile=tile, block_size=16, longest=150)
    assert str(jax.make_jaxpr(attention)(*given)).count("while[") == groups
    close(jax.jit(attention)(*given), expected, real)


def test_the_number_of_turns_is_data_and_not_shape():
    traced = []

    def counted(*arguments):
        traced.append(1)
        return attention(*arguments)

    run = jax.jit(counted)
    for seed in range(4):
        given, expected, real = case(seed, tiles=3, tile=16, block_size=16, longest=400)
        close(run(*given), expected, real)
    assert len(traced) == 1


@pytest.mark.parametrize(("tile", "block_size"), [(1, 16), (16, 8)])
def test_the_kernel_is_dense_attention_when_interpreted(tile, block_size):
    run = jax.jit(partial(pallas_attention, interpret=True))
    for seed in range(3):
        given, expected, real = case(seed, tiles=3, tile=tile, block_size=block_size, longest=40)
        close(run(*given), expected, real)


def test_the_kernel_is_dense_attention_in_the_interpreter_of_tpu_memory():
    from jax.experimental.pallas import tpu as pltpu

    given, expected, real = case(1, tiles=3, tile=16, block_size=16, longest=40)
    close(pallas_attention(*given, interpret=pltpu.InterpretParams()), expected, real)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", [1, 16])
def test_the_kernel_is_lowered_for_tpus_without_one(tile, dtype):
    given, _, _ = case(0, tiles=4, tile=tile, block_size=16, longest=64)
    query, keys, values, *where = given
    given = (query.astype(dtype), keys.astype(dtype), values.astype(dtype), *where)
    exported = jax.export.export(jax.jit(pallas_attention), platforms=["tpu"])(*given)
    assert exported.platforms == ("tpu",)
    assert "tpu_custom_call" in exported.mlir_module()
    assert len(exported.serialize()) > 1000


def test_tables_are_whole_chunks():
    assert blocks_per_chunk(16) == 8
    assert blocks_per_chunk(256) == 1
    assert table_width(300, 16) == 24
    assert table_width(1, 128) == 1
