"""Virtual memory of a GPU through HIP, for pools that sleep."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import ClassVar

from hardpoint_runtime.accelerator.driver_memory import DriverVirtualMemory


class RocmVirtualMemory(DriverVirtualMemory):
    """As HIP's "Virtual Memory Management" has it: structures and codes are those of its model."""

    library_name: ClassVar[str] = "libamdhip64.so"
    functions: ClassVar[Mapping[str, str]] = {
        "granularity": "hipMemGetAllocationGranularity",
        "reserve": "hipMemAddressReserve",
        "create": "hipMemCreate",
        "map": "hipMemMap",
        "access": "hipMemSetAccess",
        "unmap": "hipMemUnmap",
        "destroy": "hipMemRelease",
        "free": "hipMemAddressFree",
        "to_host": "hipMemcpyDtoH",
        "to_device": "hipMemcpyHtoD",
    }

    def make_current(self) -> None:
        """Tell HIP which device the thread means: a new one means the first."""
        index = self._location.index
        self.require("hipSetDevice", self._library.hipSetDevice(index))

    def told(self, code: int) -> str:
        """Ask HIP."""
        function = self._library.hipGetErrorString
        function.restype = ctypes.c_char_p
        return (function(code) or b"unknown").decode(errors="replace")
