"""A cache of int8: what is read is what was written, to a 254th of each head's greatest number."""

from __future__ import annotations

import pytest
import torch
from hardpoint.kv_cache import KVCacheSpec
from hardpoint_runtime.attention import scaled
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.attention.paged import attention, kv_write
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.graphs.static_buffers import StaticBuffers
from hardpoint_runtime.memory.kv_cache import KVCache

KV_HEADS, HEADS, HEAD, BLOCK, BLOCKS = 2, 6, 18, 4, 12
DEVICE = HostDeviceOps()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_numbers_come_back_nearly():
    new = numbers(50, KV_HEADS, HEAD) * torch.logspace(-20, 20, 50)[:, None, None]
    rows = scaled.stored(new, torch.int8)
    assert rows.shape == (50, KV_HEADS, HEAD + 4)
    back = scaled.restored(rows.flatten(1), KV_HEADS, torch.float32).view_as(new)
    step = new.abs().amax(-1, keepdim=True) / 127
    assert ((back - new).abs() <= step * 0.5001).all()
    assert (back != new).any()


def test_zeros_stay_and_what_is_no_number_spreads_over_its_head():
    new = torch.zeros(3, KV_HEADS, HEAD)
    new[1, 0, 3], new[1, 1] = torch.nan, 1.0
    new[2, 0, 5] = torch.inf
    back = scaled.restored(scaled.stored(new, torch.int8).flatten(1), KV_HEADS, torch.float32)
    heads = back.view_as(new)
    assert not heads[0].any()
    assert heads[1, 0].isnan().all()
    assert heads[2, 0].isnan().all()
    assert torch.equal(heads[1, 1], new[1, 1])
    assert not heads[2, 1].any()


def test_a_cache_has_room_for_the_scales():
    spec = KVCacheSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size_k=HEAD, head_size_v=HEAD, dtype="int8"
    )
    wide = scaled.with_scales(spec)
    assert wide.page_bytes == BLOCK * KV_HEADS * 2 * (HEAD + 4)
    plain = KVCacheSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size_k=HEAD, head_size_v=HEAD, dtype="float32"
    )
    assert scaled.with_scales(plain) is plain
    assert wide.page_bytes < plain.page_bytes / 3


@pytest.mark.parametrize("fixed", [False, True])
def test_attention_is_that_over_the_numbers_that_come_back(fixed):
    """A decode and a prefill in one step; the earlier step's keys are in the cache."""
    lengths, queries = (7, 10), (1, 10)
    blocks = [[3, 5], [1, 2, 7]]
    places = [
        [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]
        for table, length in zip(blocks, lengths, strict=True)
    ]
    keys, values, asked = (
        numbers(sum(lengths), heads, HEAD, seed=seed)
        for seed, heads in ((1, KV_HEADS), (2, KV_HEADS), (3, HEADS))
    )
    rows = [*range(6, 7), *range(7, 17)]
    slots = [places[0][6], *places[1]]

    def run(dtype: torch.dtype, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        row = HEAD + 4 if dtype == torch.int8 else HEAD
        caches = [torch.zeros(BLOCKS, BLOCK, KV_HEADS, row, dtype=dtype) for _ in range(2)]
        for cache, new in zip(caches, (key, value), strict=True):
            cache.view(-1, KV_HEADS, row)[torch.tensor(places[0][:6])] = scaled.stored(
                new[:6], dtype
            )
        builder = AttentionMetadataBuilder(DEVICE, BLOCK)
        given = {
            "query_start": [0, 1, 11], "seq_lens": list(lengths), "block_table": blocks,
            "slots": slots, "positions": [6, *range(10)], "num_reqs": 2, "num_tokens": 11,
        }  # fmt: skip
        if fixed:
            buffers = StaticBuffers(DEVICE, tokens=11, rows=2, columns=[3])
            metadata = builder.build_for_graph(buffers.whole.groups[0], max_query=10, **given)
        else:
            metadata = builder.build(**given)
        index = torch.tensor(rows)
        with torch.inference_mode():
            kv_write(key[index], value[index], *caches, metadata)
            return attention(asked[index], *caches, metadata, scale=HEAD**-0.5)

    assert sum(queries) == len(rows)
    back = [
        scaled.restored(scaled.stored(new, torch.int8).flatten(1), KV_HEADS, torch.float32).view_as(
            new
        )
        for new in (keys, values)
    ]
    found = run(torch.int8, keys, values)
    assert torch.allclose(found, run(torch.float32, *back), atol=1e-6)
    assert not torch.allclose(found, run(torch.float32, keys, values), atol=1e-4)


def test_blocks_are_copied_with_their_scales():
    from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor

    spec = scaled.with_scales(
        KVCacheSpec(
            block_size=BLOCK, num_kv_heads=KV_HEADS, head_size_k=HEAD, head_size_v=HEAD,
            dtype="int8",
        )
    )  # fmt: skip
    plan = KVCacheConfig(
        num_blocks=BLOCKS,
        groups=(KVCacheGroup(layers=("a",), spec=spec),),
        tensors=(KVCacheTensor(num_bytes=spec.page_bytes * BLOCKS, layers=("a",)),),
    )
    cache = KVCache.allocate(plan, DEVICE)
    layer = cache.layers["a"]
    layer.key[2] = scaled.stored(numbers(BLOCK, KV_HEADS, HEAD), torch.int8)
    cache.copy_blocks([(0, 2, 5)])
    assert torch.equal(layer.key[5], layer.key[2])
    cache.zero_blocks([2])
    assert not layer.key[2].any()
