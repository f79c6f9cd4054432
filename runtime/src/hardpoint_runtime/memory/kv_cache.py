"""The KV cache of one rank: allocated from the plan, bound to layers, zeroed and copied by block.

One buffer per :class:`hardpoint.kv_cache.KVCacheTensor`. Inside it come all keys, then all values,
each as ``[num_blocks, block_size, kv_heads, head_size]``: position ``p`` of a request lives in row
``block_table[p // block_size]``, ``p % block_size``. Used by model runners, in the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
from attrs import frozen
from hardpoint.errors import MemoryBudgetError
from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec

from hardpoint_runtime.device import DTYPES, DeviceOps
from hardpoint_runtime.memory import blocks

if TYPE_CHECKING:
    from hardpoint_runtime.operations import Operations


@frozen(kw_only=True, eq=False)
class LayerCache:
    """One layer's cache: ``key`` and ``value`` are ``[num_blocks, block_size, kv_heads, head]``,
    contiguous views of the layer's buffer.
    """

    key: torch.Tensor
    value: torch.Tensor


class KVCache:
    """All layers' caches of one rank. ``layers`` maps a layer's name to its views.

    Layers that share a buffer (:attr:`KVCacheTensor.layers` names several) see the same memory.
    Blocks are zeroed and copied by ``operations``; None: in plain torch.
    """

    def __init__(
        self,
        plan: KVCacheConfig,
        layers: Mapping[str, LayerCache],
        operations: Operations | None = None,
    ) -> None:
        self.plan = plan
        self.layers = dict(layers)
        self._zero = blocks.zero_blocks if operations is None else operations.zero_blocks
        self._copy = blocks.copy_blocks if operations is None else operations.copy_blocks
        self._of_group = [_distinct(plan, group.layers, self.layers) for group in plan.groups]

    @classmethod
    def allocate(
        cls, plan: KVCacheConfig, device: DeviceOps, operations: Operations | None = None
    ) -> Self:
        """Allocate every buffer of ``plan`` and bind its layers.

        Raises MemoryBudgetError with the figures if the device does not give that much, or if a
        buffer is smaller than its layers' pages.
        """
        specs = {layer: group.spec for group in plan.groups for layer in group.layers}
        layers: dict[str, LayerCache] = {}
        for tensor in plan.tensors:
            buffer = _allocated(plan, tensor.num_bytes, device)
            for layer in tensor.layers:
                layers[layer] = _bind(layer, buffer, plan.num_blocks, specs[layer])
        if missing := sorted(set(specs) - set(layers)):
            raise MemoryBudgetError(
                f"the KV cache plan has no buffer for layer {missing[0]} ({len(missing)} in all)"
            )
        return cls(plan, layers) if operations is None else cls(plan, layers, operations)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set the blocks to zero in every layer. Called before the step's copies."""
        if not block_ids:
            return
        for group in range(len(self._of_group)):
            for planes in self._planes(group):
                self._zero(planes, torch.tensor(block_ids, device=planes[0].device))

    def copy_blocks(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy blocks as told by (group, source, destination), all read before any is written.

        Called before the step's forward.
        """
        by_group: dict[int, list[tuple[int, int]]] = {}
        for group, source, destination in copies:
            by_group.setdefault(group, []).append((source, destination))
        for group, pairs in by_group.items():
            sources, targets = zip(*pairs, strict=True)
            overlapping = not set(sources).isdisjoint(targets)
            for planes in self._planes(group):
                places = [torch.tensor(ids, device=planes[0].device) for ids in (sources, targets)]
                self._copy(planes, *places, overlapping=overlapping)

    def _planes(self, group: int) -> Iterable[list[torch.Tensor]]:
        """Give the keys of a group's layers, then their values: each have one shape."""
        caches = self._of_group[group]
        yield [cache.key for cache in caches]
        yield [cache.value for cache in caches]


def _allocated(plan: KVCacheConfig, num_bytes: int, device: DeviceOps) -> torch.Tensor:
    try:
        return device.allocate(num_bytes, "kv_cache")
    except (MemoryError, torch.OutOfMemoryError) as error:
        wanted = sum(tensor.num_bytes for tensor in plan.tensors)
        raise MemoryBudgetError(
            f"the KV cache of {plan.num_blocks} blocks needs {wanted} bytes, which "
            f"{device.device} does not give: {error}. Lower memory_utilization or num_kv_blocks"
        ) from error


def _bind(layer: str, buffer: torch.Tensor, num_blocks: int, spec: KVCacheSpec) -> LayerCache:
    dtype = DTYPES[spec.dtype]
    rows = (num_blocks, spec.block_size, spec.num_kv_heads)
    per_head = num_blocks * spec.block_size * spec.num_kv_heads
    keys, values = per_head * spec.head_size_k, per_head * spec.head_size_v
    needed = (keys + values) * dtype.itemsize
    if buffer.numel() < needed:
        raise MemoryBudgetError(
            f"the KV cache buffer of layer {layer} has {buffer.numel()} bytes; {num_blocks} blocks "
            f"of {spec.block_size} tokens need {needed}"
        )
    typed = buffer[:needed].view(dtype)
    return LayerCache(
        key=typed[:keys].view(*rows, spec.head_size_k),
        value=typed[keys:].view(*rows, spec.head_size_v),
    )


def _distinct(
    plan: KVCacheConfig, names: Iterable[str], layers: Mapping[str, LayerCache]
) -> list[LayerCache]:
    """Return the caches of these layers, each piece of memory once."""
    buffer = {layer: index for index, tensor in enumerate(plan.tensors) for layer in tensor.layers}
    return list({buffer[name]: layers[name] for name in names}.values())
