"""The light module that the entry point names: it imports nothing but hardpoint."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord


@hookimpl
def hardpoint_platform() -> PlatformRecord:
    """Offer ``rocm``."""
    return PlatformRecord(
        name="rocm",
        api=(2, 0),
        platform="hardpoint_rocm.platform:RocmPlatform",
        settings="hardpoint_rocm.settings:RocmSettings",
        summary="AMD GPUs through torch",
    )
