"""The light module that the entry point names: it imports nothing but hardpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hardpoint.hookspecs import hookimpl
from hardpoint.records import Operation, PlatformRecord
from hardpoint.references import resolve


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


@hookimpl
def hardpoint_operations() -> Sequence[Operation]:
    """Offer the toolkit's kernels, in workers: where they cannot serve, the reason is logged."""
    offers = resolve("hardpoint_runtime.kernels.offers:kernel_operations")
    return cast("Sequence[Operation]", offers("cuda"))
