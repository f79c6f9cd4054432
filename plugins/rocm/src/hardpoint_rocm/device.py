"""rocm's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps

from hardpoint_rocm.platform import RocmPlatform
from hardpoint_rocm.virtual_memory import RocmVirtualMemory


class RocmDeviceOps(AcceleratorDeviceOps):
    """The port to one AMD GPU."""

    graph_class: ClassVar[str | None] = "CUDAGraph"  # as torch for ROCm calls it
    default_graph_mode: ClassVar[str] = "full_and_piecewise"
    collectives: ClassVar[str | None] = RocmPlatform.collectives
    workspaces: ClassVar[str | None] = "_cuda_clearCublasWorkspaces"
    """hipBLAS's: it has one for each stream that multiplied."""

    def make_virtual_memory(self) -> RocmVirtualMemory:
        """Build the port to the driver."""
        return RocmVirtualMemory(self.device.index or 0)


class RocmGroupDeviceOps(RocmDeviceOps):
    """The port of a rank that shares layers with others, so that graphs would hold collectives:
    torch's watchdog of these asks for its events, which HIP takes for part of a capture by whatever
    thread, and ends that.
    """

    default_graph_mode: ClassVar[str] = "none"
