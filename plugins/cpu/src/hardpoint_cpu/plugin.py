"""The light module that the entry point names: it imports nothing but hardpoint."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.hookspecs import hookimpl
from hardpoint.records import Offer, Operation, PlatformRecord


@hookimpl
def hardpoint_platform() -> PlatformRecord:
    """Offer ``cpu``."""
    return PlatformRecord(
        name="cpu",
        api=(2, 0),
        platform="hardpoint_cpu.platform:CpuPlatform",
        settings="hardpoint_cpu.settings:CpuSettings",
        summary="the host's own processors",
    )


@hookimpl
def hardpoint_operations() -> Sequence[Operation]:
    """Offer the linear layer that knows how host processors multiply."""
    return [
        Operation(name="linear", platform="cpu", reference="hardpoint_runtime.host_linear:linear")
    ]


@hookimpl
def hardpoint_quantizations() -> Sequence[Offer]:
    """Offer the native library's packed forms."""
    return [
        Offer(name=name, platform="cpu", reference=f"hardpoint_cpu.quantization:{reference}")
        for name, reference in (("int8", "Int8"), ("w8a8", "W8A8"), ("w4a8", "W4A8"))
    ]
