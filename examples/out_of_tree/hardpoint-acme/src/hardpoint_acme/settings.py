"""The keys ``plugins.acme.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key


@frozen(kw_only=True)
class AcmeSettings:
    """What the device is like, and how weights are kept in it."""

    memory_bytes: int = key(2 << 30, "memory of the device", low=1 << 20)
    quantization: str | None = key(None, "how weights are kept: a name such as acme8")
