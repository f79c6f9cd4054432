"""The light module of a test platform: named by an entry point, imports nothing but hardpoint."""

from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord


@hookimpl
def hardpoint_platform():
    return PlatformRecord(
        name="simulated", api=(2, 0), platform="simulated_platform:SimulatedPlatform"
    )
