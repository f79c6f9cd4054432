"""The light module that the entry point names: what this plugin offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardpoint.hookspecs import hookimpl
from hardpoint.records import Offer, Operation, PlatformRecord


@hookimpl
def hardpoint_platform() -> PlatformRecord:
    """Offer ``acme``."""
    return PlatformRecord(
        name="acme",
        api=(2, 0),
        platform="hardpoint_acme.platform:AcmePlatform",
        settings="hardpoint_acme.settings:AcmeSettings",
        messages=("hardpoint_acme.messages:BankRequest", "hardpoint_acme.messages:StepReport"),
        summary="a simulated accelerator",
    )


@hookimpl
def hardpoint_operations() -> Sequence[Operation]:
    """Offer the device's own norm."""
    return [
        Operation(
            name="rms_norm",
            platform="acme",
            reference="hardpoint_acme.operations:rms_norm",
            supports=wide_enough,
        )
    ]


def wide_enough(description: Mapping[str, object]) -> str | None:
    """Say why the norm cannot serve a model; its lanes are eight numbers wide."""
    head_size = description.get("head_size")
    if isinstance(head_size, int) and head_size % 8:
        return f"heads of {head_size} do not fill lanes of 8"
    return None


@hookimpl
def hardpoint_quantizations() -> Sequence[Offer]:
    """Offer ``acme8``: a byte for each weight."""
    return [Offer(name="acme8", platform="acme", reference="hardpoint_acme.quantization:ByteRows")]


@hookimpl
def hardpoint_scheduling() -> Sequence[Offer]:
    """Offer ``acme-banks``, for the key ``admission``."""
    return [Offer(name="acme-banks", platform="acme", reference="hardpoint_acme.admission:Banks")]
