"""The light module that the entry point names: it imports nothing but hardpoint."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord


@hookimpl
def hardpoint_platform() -> PlatformRecord:
    """Offer ``dummy``."""
    return PlatformRecord(
        name="dummy",
        api=(2, 0),
        platform="hardpoint_dummy.platform:DummyPlatform",
        settings="hardpoint_dummy.settings:DummySettings",
        summary="a fake device with a deterministic fake model",
    )
