"""xpu's DeviceOps: graphs of the device, its collective library, and memory that can sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hardpoint_runtime.accelerator.collectives import device_communicator
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps

from hardpoint_xpu.platform import XpuPlatform

if TYPE_CHECKING:
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group


class XpuDeviceOps(AcceleratorDeviceOps):
    """The port to one Intel GPU."""

    graph_class: ClassVar[str | None] = "XPUGraph"

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """By the collective library that torch was built with."""
        return device_communicator(self, group, meeting, XpuPlatform.collectives)
