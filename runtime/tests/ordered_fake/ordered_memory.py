"""The memory of the ordered device: an allocator with figures, and virtual memory that can be taken
from under tensors.

Tensors count once for each piece of memory. What the allocator has taken it keeps until it is
emptied. Tensors of a pool lie in pages of a real mapping, beside the allocator: unmapped, they
cannot be touched, and the device says so before the processor does. New pages hold rubbish.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from hardpoint_runtime.accelerator.host_memory import HostVirtualMemory

TOTAL = 16 << 30
RUBBISH = 0x5A


class Memory:
    """The figures. ``other`` is what libraries and other processes hold; ``kept`` what the
    allocator has taken, ``plain`` what of it tensors hold; ``mapped`` what pools have.
    """

    def __init__(self):
        self.total = TOTAL
        self.other = 0
        self.plain = self.kept = self.mapped = 0
        self.peak = self.peak_reserved = 0

    @property
    def free(self):
        return self.total - self.other - self.kept - self.mapped

    def take(self, num_bytes):
        """Memory for a tensor; it is given back with its history."""
        if num_bytes > self.free + self.kept - self.plain:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes were asked for, {self.free} are free")
        self.plain += num_bytes
        self.kept = max(self.kept, self.plain)
        self.see()

    def give_back(self, num_bytes):
        self.plain -= num_bytes

    def see(self):
        self.peak = max(self.peak, self.memory_allocated())
        self.peak_reserved = max(self.peak_reserved, self.memory_reserved())

    # What the device's module offers.

    def mem_get_info(self, device=None):
        return max(0, self.free), self.total

    def memory_allocated(self, device=None):
        return self.plain

    def memory_reserved(self, device=None):
        return self.kept

    def max_memory_allocated(self, device=None):
        return self.peak

    def max_memory_reserved(self, device=None):
        return self.peak_reserved

    def reset_peak_memory_stats(self, device=None):
        self.peak, self.peak_reserved = 0, 0
        self.see()

    def empty_cache(self):
        self.kept = self.plain


MEMORY = Memory()


class Range:
    """A range of addresses, and what lies in it."""

    def __init__(self, address, num_bytes):
        self.address, self.num_bytes = address, num_bytes
        self.mapped = False
        self.histories = weakref.WeakSet()
        self.points = {}  # how far work on tensors that are gone goes, by stream

    def has(self, address):
        return self.address <= address < self.address + self.num_bytes


RANGES = {}


class OrderedVirtualMemory(HostVirtualMemory):
    """Real pages; taken away only when all work on them is known to be done."""

    new_is_zero = False
    require_known = None  # set by ordered_device

    def reserve(self, num_bytes):
        address = super().reserve(num_bytes)
        RANGES[address] = Range(address, num_bytes)
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
