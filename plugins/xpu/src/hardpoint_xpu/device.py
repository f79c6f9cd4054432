"""xpu's DeviceOps."""

from __future__ import annotations

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps


class XpuDeviceOps(AcceleratorDeviceOps):
    """The port to one Intel GPU."""
