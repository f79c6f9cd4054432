"""The Executor suite: what callers may rely on. Runs with the dummy platform."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_conformance.executor.calls import CallTests
from hardpoint_conformance.executor.errors import ErrorTests
from hardpoint_conformance.executor.life import LifeTests


class ExecutorSuite(CallTests, ErrorTests, LifeTests):
    """Order, broadcast, ids, timeouts, futures, exceptions, death, health, shutdown, leaks."""

    contract: ClassVar[str] = "executor"
