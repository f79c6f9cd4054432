"""What the conformance kit cannot see through the contracts. Needs the extra ``conformance``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hardpoint_conformance import Probe
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps

if TYPE_CHECKING:
    from hardpoint.worker import Worker


class XpuProbe(Probe):
    """Looks inside the platform ``xpu``."""

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
        return torch is not None and torch.xpu.is_initialized()
