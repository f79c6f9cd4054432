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

    _context: ctypes.c_void_p | None = None
    """The device's own, which torch uses; kept once it was needed."""

    def make_current(self) -> None:
        """Give a thread that has no context the device's."""
        driver, current = self._library, ctypes.c_void_p()
        self.require("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(current)))
        if current.value is not None:
            return
        if self._context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            code = driver.cuDeviceGet(ctypes.byref(device), self._location.index)
            self.require("cuDeviceGet", code)
            code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            self.require("cuDevicePrimaryCtxRetain", code)
            self._context = context
        self.require("cuCtxSetCurrent", driver.cuCtxSetCurrent(self._context))

    def told(self, code: int) -> str:
        """Ask the driver."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"unknown").decode(errors="replace")
