"""The keys ``plugins.acme.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key


@frozen(kw_only=True)
class AcmeSettings:
    """What the device is like."""

    memory_bytes: int = key(2 << 30, "memory of the device", low=1 << 20)
