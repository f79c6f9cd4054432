"""The Platform suite."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_conformance.suite import Suite


class PlatformSuite(Suite):
    """To be filled."""

    contract: ClassVar[str] = "platform"
    kinds: ClassVar[tuple[str, ...]] = ("platform",)
