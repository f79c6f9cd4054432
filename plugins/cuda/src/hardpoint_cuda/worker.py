"""The cuda worker."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_runtime.accelerator.worker import AcceleratorWorker

from hardpoint_cuda.device import CudaDeviceOps


class CudaWorker(AcceleratorWorker):
    """One rank on one NVIDIA GPU."""

    device_type: ClassVar[str] = "cuda"

    def port_class(self) -> type[CudaDeviceOps]:
        """Return what this rank's port is."""
        return CudaDeviceOps
