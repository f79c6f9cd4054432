"""cuda's DeviceOps: graphs of the device, NCCL, and memory that can sleep."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps


class CudaDeviceOps(AcceleratorDeviceOps):
    """The port to one NVIDIA GPU."""

    graph_class: ClassVar[str | None] = "CUDAGraph"
