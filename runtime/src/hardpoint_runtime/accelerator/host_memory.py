"""Virtual memory of the host in the place of a device's: the same port, by ``mmap``.

A reserved range without memory behind it cannot be touched: whoever does ends with SIGSEGV, as a
device ends with an illegal access.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import ClassVar

import torch

from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory

NO_ACCESS, READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
FIXED, NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE of Linux
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class HostVirtualMemory(VirtualMemory):
    """Pages of this process, on Linux. ``limit`` is how many bytes may be mapped at once."""

    granularity = mmap.PAGESIZE
    new_is_zero: ClassVar[bool] = True

    def __init__(self, limit: int | None = None) -> None:
        if sys.platform != "linux":
            raise OSError(f"memory cannot be mapped at a fixed address on {sys.platform}")
        self.limit = limit
        self.mapped = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_int64,
        )  # fmt: skip
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses that nobody may touch."""
        return self._mmap(None, num_bytes, NO_ACCESS, PRIVATE | NO_RESERVE)

    def map(self, address: int, num_bytes: int) -> None:
        """Put fresh pages behind a range."""
        if self.limit is not None and self.mapped + num_bytes > self.limit:
            raise torch.OutOfMemoryError(
                f"{num_bytes} bytes were asked for; {self.mapped} of {self.limit} are mapped"
            )
        self._mmap(address, num_bytes, READ_WRITE, PRIVATE | FIXED)
        self.mapped += num_bytes

    def unmap(self, address: int, num_bytes: int) -> None:
        """Give the pages back."""
        self._mmap(address, num_bytes, NO_ACCESS, PRIVATE | FIXED | NO_RESERVE)
        self.mapped -= num_bytes

    def release(self, address: int, num_bytes: int) -> None:
        """Give the addresses back."""
        if self._libc.munmap(address, num_bytes):
            raise self._error("munmap", num_bytes)

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy out."""
        ctypes.memmove(into.data_ptr(), address, into.numel())

    def write(self, address: int, values: torch.Tensor) -> None:
        """Copy in."""
        ctypes.memmove(address, values.data_ptr(), values.numel())

    def _mmap(self, address: int | None, num_bytes: int, protection: int, flags: int) -> int:
        found = self._libc.mmap(address, num_bytes, protection, flags, -1, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise self._error("mmap", num_bytes)
        return int(found)

    @staticmethod
    def _error(call: str, num_bytes: int) -> Exception:
        code = ctypes.get_errno()
        text = f"{call} of {num_bytes} bytes: {os.strerror(code)}"
        return torch.OutOfMemoryError(text) if code == errno.ENOMEM else OSError(code, text)
