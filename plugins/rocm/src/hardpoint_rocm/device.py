"""rocm's DeviceOps: as torch for ROCm names things, those of another vendor's devices."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps


class RocmDeviceOps(AcceleratorDeviceOps):
    """The port to one AMD GPU. torch calls its graphs CUDAGraph, and RCCL ``nccl``."""

    graph_class: ClassVar[str | None] = "CUDAGraph"
