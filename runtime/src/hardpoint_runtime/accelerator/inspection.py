"""What probes of the conformance kit see of an accelerator's worker and of torch, alike for all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps

if TYPE_CHECKING:
    from hardpoint.worker import Worker


def allocator_bytes(worker: Worker) -> int | None:
    """Return what torch's allocator holds for the worker's device; None where there is no such
    figure: before the device is taken, and of a substitute.
    """
    device = worker.device  # type: ignore[attr-defined]
    if device is None or isinstance(device, SubstituteDeviceOps):
        return None
    return int(device.memory_reserved())


def is_initialised(torch_name: str) -> bool:
    """Return whether torch has taken such a device in this process. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(getattr(torch, torch_name).is_initialized())
