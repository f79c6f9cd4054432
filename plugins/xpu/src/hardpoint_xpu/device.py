"""xpu's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.moving_pools import MovingPools
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps

from hardpoint_xpu.platform import XpuPlatform

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.pools import AddressKeepingPools


class XpuDeviceOps(AcceleratorDeviceOps):
    """The port to one Intel GPU."""

    graph_class: ClassVar[str | None] = "XPUGraph"
    default_graph_mode: ClassVar[str] = "none"  # unasked, memory can sleep: not both are to be had
    collectives: ClassVar[str | None] = XpuPlatform.collectives

    def make_pools(self) -> AddressKeepingPools:
        """Build pools whose tensors move when they sleep: torch has no way to this device's
        virtual memory.
        """
        return moving_pools(self)


class XpuSubstituteOps(SubstituteDeviceOps):
    """Host memory in a GPU's place: it moves when it sleeps, as there."""

    def make_pools(self) -> AddressKeepingPools:
        """Build the device's kind of pools."""
        return moving_pools(self)


def moving_pools(device: AcceleratorDeviceOps) -> MovingPools:
    """Build pools of ``device``, whose tensors move when they sleep."""
    return MovingPools(device.host_buffer, device.synchronize, device.empty_cache)
