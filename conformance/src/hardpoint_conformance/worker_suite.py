"""The Worker suite: one rank's life, behind an executor."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_conformance.worker.memory import MemoryTests
from hardpoint_conformance.worker.order import OrderTests
from hardpoint_conformance.worker.services import ServiceTests
from hardpoint_conformance.worker.sleep import SleepTests


class WorkerSuite(OrderTests, MemoryTests, SleepTests, ServiceTests):
    """Order, memory, sleep, reload, services, shutdown."""

    contract: ClassVar[str] = "worker"
