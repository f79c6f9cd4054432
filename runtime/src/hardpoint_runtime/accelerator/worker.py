"""The worker of accelerators: takes the rank's device and accounts for its memory."""

from __future__ import annotations

import logging
from typing import ClassVar, cast

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.memory import MemoryProfile, MemorySnapshot
from hardpoint_runtime.device import DeviceOps
from hardpoint_runtime.worker import TorchWorker

_logger = logging.getLogger("hardpoint.worker")


class AcceleratorWorker(TorchWorker):
    """One rank on one accelerator. Local rank i has the logical device i, under whatever mask the
    process was started: none is set here.

    After ``determine_available_memory``: ``profile_of_memory``, the account behind its answer.
    """

    device_type: ClassVar[str] = ""
    """torch's name of the device; empty: the platform's name."""

    device: AcceleratorDeviceOps | None
    baseline: MemorySnapshot | None = None
    memory_profile: MemoryProfile | None = None

    @property
    def torch_device(self) -> str:
        """What torch calls the device."""
        return self.device_type or self.platform.name

    def make_device(self) -> AcceleratorDeviceOps:
        """Build the port to this rank's device."""
        return AcceleratorDeviceOps(self.torch_device, self.device_index)

    def init_device(self) -> None:
        """Take the device. Raises ConfigError for one that this process does not see, and
        LifecycleError where the process was forked after the device had been taken.
        """
        super().init_device()

    def _budget(self, device: DeviceOps) -> int:
        """Note what is used before anything is loaded, then fix the budget."""
        self.baseline = cast("AcceleratorDeviceOps", device).snapshot()
        return super()._budget(device)
