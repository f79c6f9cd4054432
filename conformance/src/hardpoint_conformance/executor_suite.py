"""The Executor suite."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_conformance.suite import Suite


class ExecutorSuite(Suite):
    """To be filled."""

    contract: ClassVar[str] = "executor"
    kinds: ClassVar[tuple[str, ...]] = ("executor",)
