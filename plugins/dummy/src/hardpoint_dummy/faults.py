"""Faults on demand: named points at which the fake device fails, each counted."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

from hardpoint.rpc import faults as core
from hardpoint.rpc.faults import EXIT_CODE, FOREVER, Fault

__all__ = ["EXIT_CODE", "KINDS", "POINTS", "DummyFault", "Fault", "FaultPoints", "parse_faults"]

POINTS = ("build", "init_device", "load", "warm_up", "step", "sample", "shutdown")
KINDS = ("raise", "exit", "hang", "kill", "stop", "memory_error", "ignore_term")
"""``hang`` waits until the driver gives the work up; ``ignore_term`` waits whatever the driver and
SIGTERM say.
"""


class DummyFault(ValueError):  # noqa: N818 - it is the fault itself that is raised
    """What an injected fault raises: the point, which passage of it, and the rank."""

    def __init__(self, point: str, nth: int, rank: int) -> None:
        super().__init__(point, nth, rank)
        self.point, self.nth, self.rank = point, nth, rank

    def __str__(self) -> str:
        return f"injected fault: {self.point}, passage {self.nth}, rank {self.rank}"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults that ``plugins.dummy.fail_at`` describes; raise ValueError saying what is
    wrong with it.
    """
    return core.parse_faults(text, POINTS, KINDS)


class FaultPoints:
    """One worker's points. ``hang()`` waits until the driver gives the work up; in ``log``, if
    given, each fault that fires is counted, as :func:`hardpoint.rpc.faults.fired` reads it.
    """

    def __init__(
        self,
        faults: tuple[Fault, ...],
        rank: int,
        hang: Callable[[], None],
        log: str | None = None,
    ) -> None:
        self._faults = [fault for fault in faults if fault.rank in (None, rank)]
        self._rank = rank
        self._hang = hang
        self._log = log
        self.passed: Counter[str] = Counter()
        """How often each point was passed: a fault that did not fire shows here."""

    def __call__(self, point: str) -> None:
        """Pass ``point``; fail if a fault is due there."""
        self.passed[point] += 1
        for fault in self._faults:
            if fault.point == point and fault.nth == self.passed[point]:
                self._fail(fault)

    def _fail(self, fault: Fault) -> None:
        if self._log:
            core.append(self._log, f"fired-{fault.point}")
        if fault.kind == "hang":
            self._hang()
        elif fault.kind == "ignore_term":
            _ignore_term()
        elif fault.kind != "raise":
            core.strike(fault.kind)
            return  # it was stopped, and goes on
        raise DummyFault(fault.point, fault.nth, self._rank)


def _ignore_term() -> None:
    if threading.current_thread() is threading.main_thread():  # else there is no process to end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(FOREVER)
