"""rocm's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hardpoint_runtime.accelerator.collectives import device_communicator
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.torch_pools import TorchPools

from hardpoint_rocm.platform import RocmPlatform
from hardpoint_rocm.virtual_memory import RocmVirtualMemory

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.pools import AddressKeepingPools
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group


class RocmDeviceOps(AcceleratorDeviceOps):
    """The port to one AMD GPU."""

    graph_class: ClassVar[str | None] = "CUDAGraph"  # as torch for ROCm calls it

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

    def make_virtual_memory(self) -> RocmVirtualMemory:
        """Build the port to the driver."""
        return RocmVirtualMemory(self.device.index or 0)

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """By the collective library that torch was built with."""
        return device_communicator(self, group, meeting, RocmPlatform.collectives)
