"""What the conformance kit cannot see through the contracts. Needs the extra ``conformance``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_conformance import Probe
from hardpoint_runtime.accelerator.inspection import allocator_bytes, is_initialised

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
        """Ask torch's allocator."""
        return allocator_bytes(worker)

    @staticmethod
    def initialised() -> bool:
        """Ask torch, where it is loaded."""
        return is_initialised("cuda")

    def visible_devices(self, mask: str) -> tuple[str, ...]:
        """Return what a process on a machine of eight would see."""
        return tuple(unit.id for unit in visible(EIGHT, mask).units)
