"""The light module that the entry point names: it imports nothing but hardpoint."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord


@hookimpl
def hardpoint_platform() -> PlatformRecord:
    """Offer ``cuda``."""
    return PlatformRecord(
        name="cuda",
        api=(2, 0),
        platform="hardpoint_cuda.platform:CudaPlatform",
        settings="hardpoint_cuda.settings:CudaSettings",
        summary="NVIDIA GPUs through torch",
    )
