"""The memory of the ordered device: an allocator with figures and pools, and virtual memory that
can be taken from under tensors.

Tensors count once for each piece of memory. What the allocator has taken it keeps until it is
emptied. Tensors of a pool lie in pages of a real mapping: unmapped, they cannot be touched, and the
device says so before the processor does. New pages hold rubbish.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref

import torch
from hardpoint_runtime.accelerator.host_memory import HostVirtualMemory
from hardpoint_runtime.accelerator.torch_pools import ALLOCATE, FREE

TOTAL = 16 << 30
RUBBISH = 0x5A


class Memory:
    """The figures. ``other`` is what libraries and other processes hold; ``kept`` what the
    allocator has taken outside pools, ``plain`` what of it tensors hold; ``pooled`` what pools have
    taken, ``mapped`` what of that has memory now.
    """

    def __init__(self):
        self.total = TOTAL
        self.other = 0
        self.plain = self.kept = 0
        self.in_pools = self.pooled = self.mapped = 0
        self.peak = self.peak_reserved = 0
        self.pool = None

    @property
    def free(self):
        return self.total - self.other - self.kept - self.mapped

    def take(self, num_bytes, pooled):
        """Memory for a tensor; it is given back with its history."""
        if pooled:
            self.in_pools += num_bytes
        elif num_bytes > self.free + self.kept - self.plain:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes were asked for, {self.free} are free")
        else:
            self.plain += num_bytes
            self.kept = max(self.kept, self.plain)
        self.see()

    def give_back(self, num_bytes, pooled):
        if pooled:
            self.in_pools -= num_bytes
        else:
            self.plain -= num_bytes

    def see(self):
        self.peak = max(self.peak, self.memory_allocated())
        self.peak_reserved = max(self.peak_reserved, self.memory_reserved())

    # What the device's module offers.

    def mem_get_info(self, device=None):
        return max(0, self.free), self.total

    def memory_allocated(self, device=None):
        return self.plain + self.in_pools

    def memory_reserved(self, device=None):
        return self.kept + self.pooled

    def max_memory_allocated(self, device=None):
        return self.peak

    def max_memory_reserved(self, device=None):
        return self.peak_reserved

    def reset_peak_memory_stats(self, device=None):
        self.peak, self.peak_reserved = 0, 0
        self.see()

    def empty_cache(self):
        for pool in POOLS:
            pool.empty()
        self.kept = self.plain

    @contextlib.contextmanager
    def use_mem_pool(self, pool, device=None):
        outer, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = outer


MEMORY = Memory()


POOLS = weakref.WeakSet()


class MemPool:
    """Memory from an allocator, as of a pluggable one: two C functions. What tensors give back is
    kept for others of the size, until the cache is emptied or the pool is gone.
    """

    def __init__(self, allocator):
        self.allocate, self.free = allocator
        self.kept = {}
        POOLS.add(self)

    def __del__(self):
        self.empty()

    def empty(self):
        while self.kept:
            num_bytes, addresses = self.kept.popitem()
            for address in addresses:
                self.free(address, num_bytes, 0, None)

    def tensor(self, size, dtype):
        """Return the host tensor inside, and the range that it lies in."""
        num_bytes = max(1, math.prod(size) * dtype.itemsize)
        kept = self.kept.get(num_bytes)
        address = kept.pop() if kept else self.allocate(num_bytes, 0, None)
        if not address:
            raise torch.OutOfMemoryError(f"the pool gives no {num_bytes} bytes")
        memory = (ctypes.c_char * num_bytes).from_address(address)
        given = (weakref.ref(self), self.free, address, num_bytes)
        weakref.finalize(memory, given_back, *given).atexit = False
        whole = torch.frombuffer(memory, dtype=dtype)
        return whole[: math.prod(size)].view(tuple(size)), RANGES[address]


def given_back(pool, free, address, num_bytes):
    """No tensor is in a piece of memory any more."""
    pool = pool()
    if pool is None:
        free(address, num_bytes, 0, None)
    else:
        pool.kept.setdefault(num_bytes, []).append(address)


def make_allocator(allocate, free):
    """What torch makes of the addresses of two functions."""
    return ALLOCATE(allocate), FREE(free)


class Range:
    """A range of addresses, and what lies in it."""

    def __init__(self, address, num_bytes):
        self.address, self.num_bytes = address, num_bytes
        self.mapped = False
        self.histories = weakref.WeakSet()
        self.points = {}  # how far work on tensors that are gone goes, by stream

    def require_done(self):
        """Raise unless the host knows that work on tensors which are gone is done."""


RANGES = {}


class OrderedVirtualMemory(HostVirtualMemory):
    """Real pages; taken away only when all work on them is known to be done."""

    require_known = None  # set by ordered_device

    def reserve(self, num_bytes):
        address = super().reserve(num_bytes)
        RANGES[address] = Range(address, num_bytes)
        MEMORY.pooled += num_bytes
        MEMORY.see()
        return address

    def map(self, address, num_bytes):
        if num_bytes > MEMORY.free:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes to map, {MEMORY.free} are free")
        super().map(address, num_bytes)
        ctypes.memset(address, RUBBISH, num_bytes)
        MEMORY.mapped += num_bytes
        RANGES[address].mapped = True

    def unmap(self, address, num_bytes):
        for history in RANGES[address].histories:
            history.require_done("memory is taken from under it")
        self.require_known(RANGES[address].points.items(), "memory is taken from under it")
        super().unmap(address, num_bytes)
        MEMORY.mapped -= num_bytes
        RANGES[address].mapped = False

    def release(self, address, num_bytes):
        if RANGES.pop(address).mapped:
            raise OSError(f"the range at {address:#x} is released with memory behind it")
        super().release(address, num_bytes)
        MEMORY.pooled -= num_bytes
