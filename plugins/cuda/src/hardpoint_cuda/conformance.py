"""What the conformance kit cannot see through the contracts. Needs the extra ``conformance``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hardpoint_conformance import Probe
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps

from hardpoint_cuda.nvml import Gpu
from hardpoint_cuda.visible_gpus import visible

if TYPE_CHECKING:
    from hardpoint.worker import Worker

EIGHT = tuple(
    Gpu(index=n, uuid=f"GPU-8a6f1c9e-{n:04}", name="GPU", memory_bytes=None, capability=None)
    for n in range(8)
)
"""A machine."""


class CudaProbe(Probe):
    """Looks inside the platform ``cuda``."""

    @staticmethod
    def held_bytes(worker: Worker) -> int | None:
        """Ask torch's allocator. Of the substitute there are no such figures."""
        device = worker.device  # type: ignore[attr-defined]
        if device is None or isinstance(device, SubstituteDeviceOps):
            return None
        return int(device.memory_reserved())

    @staticmethod
    def initialised() -> bool:
        """Ask torch, where it is loaded."""
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_initialized()

    def visible_devices(self, mask: str) -> tuple[str, ...]:
        """Return what a process on a machine of eight would see."""
        return tuple(unit.id for unit in visible(EIGHT, mask).units)
