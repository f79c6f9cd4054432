"""rocm's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps

from hardpoint_rocm.platform import RocmPlatform
from hardpoint_rocm.virtual_memory import RocmVirtualMemory


class RocmDeviceOps(AcceleratorDeviceOps):
    """The port to one AMD GPU."""

    graph_class: ClassVar[str | None] = "CUDAGraph"  # as torch for ROCm calls it
    default_graph_mode: ClassVar[str] = "full_and_piecewise"
    collectives: ClassVar[str | None] = RocmPlatform.collectives

    def make_allocator(self, allocate: int, free: int) -> Any:
        """Return torch's handle of an allocator, from the addresses of its two functions."""
        return torch._C._cuda_customAllocator(allocate, free)  # noqa: SLF001

    def make_virtual_memory(self) -> RocmVirtualMemory:
        """Build the port to the driver."""
        return RocmVirtualMemory(self.device.index or 0)

    def release_workspaces(self) -> None:
        """Clear torch's work space for hipBLAS, which it has for each stream that multiplied."""
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001
        if clear is not None:
            clear()


class RocmGroupDeviceOps(RocmDeviceOps):
    """The port of a rank that shares layers with others, so that graphs would hold collectives:
    torch's watchdog of these asks for its events, which HIP takes for part of a capture by whatever
    thread, and ends that.
    """

    default_graph_mode: ClassVar[str] = "none"
