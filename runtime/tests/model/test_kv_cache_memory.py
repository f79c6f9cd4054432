"""Allocation, binding, zeroing and copying of the KV cache."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hardpoint.errors import MemoryBudgetError
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.memory.kv_cache import KVCache

BLOCKS = 6


class CountingDevice(HostDeviceOps):
    """Counts what is allocated."""

    def __init__(self):
        super().__init__()
        self.allocated = []

    def allocate(self, num_bytes, tag):
        self.allocated.append((num_bytes, tag))
        return super().allocate(num_bytes, tag)


def spec(**changes):
    values = {
        "block_size": 4,
        "num_kv_heads": 2,
        "head_size_k": 8,
        "head_size_v": 8,
        "dtype": "float32",
    }
    return KVCacheSpec(**(values | changes))


def plan(*groups, shared=()):
    """Groups are (layers, spec); ``shared`` layers live in the buffer of the first layer."""
    tensors = []
    for layers, each in groups:
        for layer in layers:
            if layer not in shared[1:]:
                names = shared if layer in shared else (layer,)
                tensors.append(KVCacheTensor(num_bytes=BLOCKS * each.page_bytes, layers=names))
    return KVCacheConfig(
        num_blocks=BLOCKS,
        groups=tuple(KVCacheGroup(layers=layers, spec=each) for layers, each in groups),
        tensors=tuple(tensors),
    )


def test_bytes_are_blocks_times_pages():
    device = CountingDevice()
    wide, narrow = spec(), spec(block_size=8, dtype="bfloat16", head_size_v=4)
    cache = KVCache.allocate(plan((("a", "b"), wide), (("c",), narrow)), device)
    assert sum(n for n, _ in device.allocated) == BLOCKS * (2 * wide.page_bytes + narrow.page_bytes)
    assert {tag for _, tag in device.allocated} == {"kv_cache"}
    assert cache.layers["a"].key.shape == (BLOCKS, 4, 2, 8)
    assert cache.layers["c"].value.shape == (BLOCKS, 8, 2, 4)
    assert cache.layers["c"].value.dtype == torch.bfloat16


def test_no_view_reaches_into_another():
    cache = KVCache.allocate(plan((("a", "b"), spec())), HostDeviceOps())
    planes = [plane for c in cache.layers.values() for plane in (c.key, c.value)]
    for number, plane in enumerate(planes):
        assert (plane == 0).all(), "a new cache is zero"
        plane.fill_(number + 1)
    for number, plane in enumerate(planes):
        assert (plane == number + 1).all()


def test_layers_may_share_a_buffer():
    cache = KVCache.allocate(plan((("a", "b", "c"), spec()), shared=("a", "b")), HostDeviceOps())
    cache.layers["a"].key.fill_(5)
    assert (cache.layers["b"].key == 5).all()
    assert (cache.layers["c"].key == 0).all()
    cache.copy_blocks([(0, 1, 2), (0, 2, 1)])  # once, though two layers show it
    cache.layers["a"].value[1], cache.layers["a"].value[2] = 1.0, 2.0
    cache.copy_blocks([(0, 1, 2), (0, 2, 1)])
    assert (cache.layers["b"].value[1] == 2).all()
    assert (cache.layers["b"].value[2] == 1).all()


def test_zeroing_reaches_every_layer_and_no_other_block():
    cache = KVCache.allocate(plan((("a",), spec()), (("b",), spec(block_size=8))), HostDeviceOps())
    for layer in cache.layers.values():
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    cache.zero_blocks([2, 4])
    cache.zero_blocks([])
    for layer in cache.layers.values():
        for plane in (layer.key, layer.value):
            assert (plane[[2, 4]] == 0).all()
            assert torch.isnan(plane[[0, 1, 3, 5]]).all()


def test_copies_stay_in_their_group():
    cache = KVCache.allocate(plan((("a",), spec()), (("b",), spec())), HostDeviceOps())
    for layer in cache.layers.values():
        layer.key[1], layer.value[1] = 7.0, 8.0
    cache.copy_blocks([(1, 1, 3)])
    assert (cache.layers["b"].key[3] == 7).all()
    assert (cache.layers["b"].value[3] == 8).all()
    assert (cache.layers["a"].key[3] == 0).all()


def test_a_buffer_smaller_than_its_pages_is_refused():
    wrong = plan((("a",), spec()))
    (tensor,) = wrong.tensors
    small = evolve(wrong, tensors=(evolve(tensor, num_bytes=tensor.num_bytes - 1),))
    with pytest.raises(MemoryBudgetError, match=f"layer a has {tensor.num_bytes - 1} bytes"):
        KVCache.allocate(small, HostDeviceOps())


def test_a_page_may_be_larger_than_the_formula():
    padded = spec(page_bytes=spec().page_bytes + 64)
    cache = KVCache.allocate(plan((("a",), padded)), HostDeviceOps())
    assert cache.layers["a"].key.is_contiguous()


def test_a_layer_without_a_buffer_is_refused():
    wrong = evolve(plan((("a", "b"), spec())), tensors=plan((("a",), spec())).tensors)
    with pytest.raises(MemoryBudgetError, match="no buffer for layer b"):
        KVCache.allocate(wrong, HostDeviceOps())
