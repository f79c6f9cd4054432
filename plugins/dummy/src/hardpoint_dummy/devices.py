"""The fake devices of a machine, and those that its variable for visible devices leaves."""

from __future__ import annotations

from hardpoint.records import Device

VISIBLE = "DUMMY_VISIBLE_DEVICES"
"""The variable: ids or UUIDs, by commas, in the order in which they are to be used."""


def devices_of(count: int, memory_bytes: int) -> tuple[Device, ...]:
    """Return ``count`` devices, ids from ``"0"``."""
    return tuple(Device(id=str(n), name="dummy", memory_bytes=memory_bytes) for n in range(count))


def uuid_of(device: Device) -> str:
    """Return the other name of a device."""
    return f"GPU-8a6f1c9e-{int(device.id):04}"


def visible(devices: tuple[Device, ...], mask: str | None) -> tuple[Device, ...]:
    """Return those that ``mask`` names by id or UUID, in its order; all where there is no mask. As
    runtimes do, it passes over what names no device of this machine.
    """
    if mask is None:
        return devices
    named = {name: each for each in devices for name in (each.id, uuid_of(each))}
    asked = (part.strip() for part in mask.split(","))
    return tuple(dict.fromkeys(named[part] for part in asked if part in named))
