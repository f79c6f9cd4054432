"""The cuda worker."""

from __future__ import annotations

from typing import ClassVar, cast

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.platform import AcceleratorPlatform
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps
from hardpoint_runtime.accelerator.worker import AcceleratorWorker

from hardpoint_cuda.device import CudaDeviceOps


class CudaWorker(AcceleratorWorker):
    """One rank on one NVIDIA GPU."""

    device_type: ClassVar[str] = "cuda"

    def make_device(self) -> AcceleratorDeviceOps:
        """Build the port to the rank's GPU, or to what stands for it."""
        platform = cast("AcceleratorPlatform", self.platform)
        if platform.on_substitute:
            return SubstituteDeviceOps.of(platform.accelerator_settings, self.device_index)
        return CudaDeviceOps(self.torch_device, self.device_index, sleeps=platform.sleeps)
