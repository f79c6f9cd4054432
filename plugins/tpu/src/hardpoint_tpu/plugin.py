"""The light module that the entry point names: it imports nothing but hardpoint."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord


@hookimpl
def hardpoint_platform() -> PlatformRecord:
    """Offer ``tpu``."""
    return PlatformRecord(
        name="tpu",
        api=(2, 0),
        platform="hardpoint_tpu.platform:TpuPlatform",
        settings="hardpoint_tpu.settings:TpuSettings",
        summary="TPUs through XLA; tried as XLA on CPU, never run on a TPU",
        messages=("hardpoint_tpu.reports:MemoryReport", "hardpoint_tpu.reports:ProgramReport"),
    )
