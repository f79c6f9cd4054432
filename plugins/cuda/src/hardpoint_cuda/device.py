"""cuda's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps

from hardpoint_cuda.platform import CudaPlatform
from hardpoint_cuda.virtual_memory import CudaVirtualMemory


class CudaDeviceOps(AcceleratorDeviceOps):
    """The port to one NVIDIA GPU."""

    graph_class: ClassVar[str | None] = "CUDAGraph"
    default_graph_mode: ClassVar[str] = "full_and_piecewise"
    collectives: ClassVar[str | None] = CudaPlatform.collectives
    workspaces: ClassVar[str | None] = "_cuda_clearCublasWorkspaces"
    """cuBLAS's: it has one for each stream that multiplied."""

    def make_virtual_memory(self) -> CudaVirtualMemory:
        """Build the port to the driver."""
        return CudaVirtualMemory(self.device.index or 0)
