"""Virtual memory of a GPU through CUDA's driver library, for pools that sleep."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import ClassVar

from hardpoint_runtime.accelerator.driver_memory import DriverVirtualMemory


class CudaVirtualMemory(DriverVirtualMemory):
    """As the "Virtual Memory Management" part of the driver's interface has it."""

    library_name: ClassVar[str] = "libcuda.so.1"
    functions: ClassVar[Mapping[str, str]] = {
        "granularity": "cuMemGetAllocationGranularity",
        "reserve": "cuMemAddressReserve",
        "create": "cuMemCreate",
        "map": "cuMemMap",
        "access": "cuMemSetAccess",
        "unmap": "cuMemUnmap",
        "destroy": "cuMemRelease",
        "free": "cuMemAddressFree",
        "to_host": "cuMemcpyDtoH_v2",
        "to_device": "cuMemcpyHtoD_v2",
    }

    def told(self, code: int) -> str:
        """Ask the driver."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"unknown").decode(errors="replace")
