"""The Worker suite."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_conformance.suite import Suite


class WorkerSuite(Suite):
    """To be filled."""

    contract: ClassVar[str] = "worker"
    kinds: ClassVar[tuple[str, ...]] = ("platform",)
