"""xpu's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hardpoint_runtime.accelerator.collectives import device_communicator
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.moving_pools import MovingPools
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps

from hardpoint_xpu.platform import XpuPlatform

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.pools import AddressKeepingPools
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group


class XpuDeviceOps(AcceleratorDeviceOps):
    """The port to one Intel GPU."""

    graph_class: ClassVar[str | None] = "XPUGraph"

    def make_pools(self) -> AddressKeepingPools:
        """Build pools whose tensors move when they sleep: torch has no way to this device's
        virtual memory.
        """
        return moving_pools(self)

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """By the collective library that torch was built with."""
        return device_communicator(self, group, meeting, XpuPlatform.collectives)


class XpuSubstituteOps(SubstituteDeviceOps):
    """Host memory in a GPU's place: it moves when it sleeps, as there."""

    def make_pools(self) -> AddressKeepingPools:
        """Build the device's kind of pools."""
        return moving_pools(self)


def moving_pools(device: AcceleratorDeviceOps) -> MovingPools:
    """Build pools of ``device``, whose tensors move when they sleep."""
    return MovingPools(device.host_buffer, device.synchronize, device.empty_cache)
