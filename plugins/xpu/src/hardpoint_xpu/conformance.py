"""What the conformance kit cannot see through the contracts. Needs the extra ``conformance``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_conformance import Probe
from hardpoint_runtime.accelerator.inspection import allocator_bytes, is_initialised

if TYPE_CHECKING:
    from hardpoint.worker import Worker


class XpuProbe(Probe):
    """Looks inside the platform ``xpu``."""

    @staticmethod
    def held_bytes(worker: Worker) -> int | None:
        """Ask torch's allocator."""
        return allocator_bytes(worker)

    @staticmethod
    def initialised() -> bool:
        """Ask torch, where it is loaded."""
        return is_initialised("xpu")
