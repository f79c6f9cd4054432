"""The light module that the entry point names: it imports nothing but hardpoint."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord


@hookimpl
def hardpoint_platform() -> PlatformRecord:
    """Offer ``xpu``."""
    return PlatformRecord(
        name="xpu",
        api=(2, 0),
        platform="hardpoint_xpu.platform:XpuPlatform",
        settings="hardpoint_xpu.settings:XpuSettings",
        summary="Intel GPUs through torch",
    )
