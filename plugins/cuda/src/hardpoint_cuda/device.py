"""cuda's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hardpoint_runtime.accelerator.collectives import device_communicator
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.torch_pools import TorchPools

from hardpoint_cuda.platform import CudaPlatform
from hardpoint_cuda.virtual_memory import CudaVirtualMemory

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.pools import AddressKeepingPools
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group


class CudaDeviceOps(AcceleratorDeviceOps):
    """The port to one NVIDIA GPU."""

    graph_class: ClassVar[str | None] = "CUDAGraph"

    def make_pools(self) -> AddressKeepingPools:
        """Build pools for torch's allocator over the driver's virtual memory."""
        return TorchPools(
            self.make_virtual_memory(),
            module=self._module,
            device=self.device,
            make_allocator=self.make_allocator,
            host_buffer=self.host_buffer,
            synchronize=self.synchronize,
        )

    def make_allocator(self, allocate: int, free: int) -> Any:
        """Return torch's handle of an allocator, from the addresses of its two functions."""
        return torch._C._cuda_customAllocator(allocate, free)  # noqa: SLF001

    def make_virtual_memory(self) -> CudaVirtualMemory:
        """Build the port to the driver."""
        return CudaVirtualMemory(self.device.index or 0)

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """By the collective library that torch was built with."""
        return device_communicator(self, group, meeting, CudaPlatform.collectives)
