"""How torch's allocations come into pools that sleep: an allocator of our own behind torch's memory
pools.

Three ways were judged (torch 2.13):

* *Expandable segments* keep addresses and map pages on demand, but only torch decides what is
  mapped: memory under a live tensor cannot be taken away. They cannot serve sleep, and torch does
  not combine them with the allocator of a pool, so a worker that sleeps refuses them.
* *A pluggable allocator alone* replaces torch's for the whole process, before its first use: every
  temporary would become a range of addresses of its own, uncached and slow, and a second engine in
  the process could not choose.
* *Memory pools with a pluggable allocator* (``MemPool(allocator)``, ``use_mem_pool``): what is
  allocated within a ``with`` on this thread comes from segments that the allocator makes, one pool
  for each tag; torch still cuts and caches them, and its figures stay right. Everything else is
  untouched. This is what is used.

The allocator's two functions are callbacks into Python. They run once for each segment, not for
each tensor, and take the interpreter's lock while torch's allocator holds its own. A thread that
has the interpreter's and asks the allocator, as one does whose last tensor goes, would wait for
ever: so **one thread of a process uses the device**, the worker's. Where others must, the key
``plugins.NAME.sleep`` = ``off`` does without pools.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hardpoint_runtime.accelerator.pools import AddressKeepingPools
from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory

_logger = logging.getLogger("hardpoint.worker")

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
"""(bytes, device, stream) -> address; 0: there is no memory."""
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
"""(address, bytes, device, stream)."""

_callbacks: list[object] = []
"""Every callback ever made. torch knows their addresses only, keeps an allocator for as long as the
process lives, and frees memory whenever the last tensor of a segment goes, which may be after the
pools: so they stay.
"""

SEGMENT = 2 << 20
"""Bytes of which torch makes large segments multiples."""

MakeAllocator = Callable[[int, int], Any]
"""Makes torch's handle of an allocator from the addresses of its two functions."""


class TorchPools(AddressKeepingPools):
    """Pools that torch allocates from. ``module`` is the device's (with ``MemPool`` and
    ``use_mem_pool``), ``make_allocator`` torch's function for allocators of that device.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        *,
        module: Any,
        device: torch.device,
        make_allocator: MakeAllocator,
        host_buffer: Callable[[Sequence[int], torch.dtype], torch.Tensor],
        synchronize: Callable[[], None],
    ) -> None:
        super().__init__(memory, host_buffer, synchronize)
        self._module = module
        self._device = device
        self._make_allocator = make_allocator
        self._torch_pools: dict[str, Any] = {}
        self._failure: Exception | None = None
        """Why the last segment that was asked for is not there: the first error of those since."""

    @contextlib.contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """Allocate from the pool of ``tag``, on this thread. torch takes whatever goes wrong for a
        lack of memory: what it was is raised in place of torch's error.
        """
        if tag not in self._torch_pools:
            self._torch_pools[tag] = self._made(tag)
        self._failure = None
        with self._module.use_mem_pool(self._torch_pools[tag], self._device):
            try:
                yield
            except torch.OutOfMemoryError as error:
                failure, self._failure = self._failure, None
                if failure is None or isinstance(failure, torch.OutOfMemoryError):
                    raise
                raise failure from error

    @property
    def rounding(self) -> int:
        """What torch's own allocator rounds large segments up to, or a page, if that is more."""
        return max(self.memory.granularity, SEGMENT)

    def close(self) -> None:
        """Drop torch's pools: what no tensor uses any more goes back to the device."""
        self._torch_pools.clear()

    def _made(self, tag: str) -> Any:
        def allocate(num_bytes: int, device: int, stream: object) -> int:
            try:
                address = self.allocate(tag, num_bytes)
            except Exception as error:  # noqa: BLE001 - torch's own, in C, hears no exception
                _logger.warning("no memory for %s: %s", tag, error)
                self._failure = self._failure or error
                return 0
            self._failure = None
            return address

        def free(address: int, num_bytes: int, device: int, stream: object) -> None:
            try:
                self.free(address)
            except Exception:
                _logger.exception("memory of %s at %#x cannot be given back", tag, address)

        callbacks = ALLOCATE(allocate), FREE(free)
        _callbacks.extend(callbacks)
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in callbacks]
        return self._module.MemPool(self._make_allocator(*addresses))
