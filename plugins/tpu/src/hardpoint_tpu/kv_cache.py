"""The KV cache on the devices: two arrays a layer, given to each step and taken from it again.

A step *uses up* the arrays it is given (they are donated: XLA writes into their memory), and what
it returns takes their place. Whoever keeps an array over a step finds it deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from hardpoint.errors import LifecycleError
from hardpoint.kv_cache import KVCacheConfig
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hardpoint_tpu.model import AXIS, Cache

SPEC = PartitionSpec(None, None, AXIS)
"""Devices share a layer's heads."""


class KVCache:
    """The caches of all layers: arrays [blocks, block size, key-value heads, head size]."""

    def __init__(self, plan: KVCacheConfig, mesh: Mesh, dtype: object) -> None:
        (group,) = plan.groups
        spec = group.spec
        self.num_blocks = plan.num_blocks
        self.block_size = spec.block_size
        self.shape = (plan.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size_k)
        self.dtype = np.dtype(dtype)  # type: ignore[call-overload]
        self.sharding = NamedSharding(mesh, SPEC)
        self._num_layers = len(group.layers)
        self._layers: list[Cache] = []
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Bytes held now, on all devices."""
        return sum(array.nbytes for layer in self._layers for array in layer)

    @property
    def abstract(self) -> Cache:
        """One layer's arrays as shapes, for compiling."""
        array = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)
        return array, array  # type: ignore[return-value]

    def allocate(self) -> None:
        """Make all arrays anew, of zeros."""
        self.release()
        self._layers = [(self._zeros(), self._zeros()) for _ in range(self._num_layers)]

    def release(self) -> None:
        """Give all memory back."""
        for layer in self._layers:
            for array in layer:
                if not array.is_deleted():
                    array.delete()
        self._layers = []

    def take(self, start: int, count: int) -> list[Cache]:
        """Return layers to be used up by a step. Raises LifecycleError if there is none."""
        if not self._layers:
            raise LifecycleError("the KV cache has no memory: it sleeps")
        return self._layers[start : start + count]

    def put(self, start: int, layers: Sequence[Cache]) -> None:
        """Keep what a step returned in their place."""
        self._layers[start : start + len(layers)] = layers

    def _zeros(self) -> jax.Array:
        part = self.sharding.shard_shape(self.shape)
        zeros = [
            jax.device_put(np.zeros(part, self.dtype), device)
            for device in self.sharding.addressable_devices_indices_map(self.shape)
        ]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, zeros)
