"""``hardpoint bench rpc``: what a call of all workers costs, beside other ways to make one.

Every transport has a driver process of its own. They take turns, in one order and then in the
other, each with the machine to itself: before the next one begins, the last has come to rest.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from hardpoint_engine.bench.driver import (
    FILES,
    Driver,
    TransportFailedError,
    TransportMissingError,
)

OURS = "hardpoint-mp"
KIB = 1024
SPORADIC_EVERY = 0.005
"""Seconds between the begins of two calls of the mode ``sporadic``."""
IDLE_FROM = 0.005
"""Seconds after the last call from which a transport's CPU time is idle time."""
IDLE_CALLS = 20

Tell = Callable[[str], None]
Document = dict[str, Any]


@frozen(kw_only=True)
class RpcPlan:
    """What is measured, and for how long. ``seconds`` is the length of a busy turn, ``calls`` how
    many calls a sporadic one has; ``pythons`` are interpreters by transport.
    """

    workers: Sequence[int] = (1, 2, 4, 8)
    sizes: Sequence[int] = (KIB, 64 * KIB, 8 * KIB * KIB)
    transports: Sequence[str] = tuple(FILES)
    rounds: int = 2
    seconds: float = 0.4
    calls: int = 100
    most_calls: int = 5000
    idle_seconds: float = 3.0
    pythons: Mapping[str, str] = field(factory=dict)


QUICK = RpcPlan(workers=(1, 2), rounds=1, seconds=0.1, calls=20, idle_seconds=0.5)


def measure(plan: RpcPlan, tell: Tell) -> Document:
    """Measure every transport that is to be had. Return ``rows``, ``idle`` and ``left_out``
    (transport -> why).

    Called by the command. ``tell`` gets a line for each stage. Raises TransportFailedError if our
    own fails; another that fails is left out from then on.
    """
    document: Document = {"rows": [], "idle": [], "left_out": {}}
    with _drivers(plan, document["left_out"], tell) as drivers:
        for workers in plan.workers:
            tell(f"{workers} {'workers' if workers > 1 else 'worker'}: {', '.join(drivers)}")
            _Group(workers, plan, drivers, document).measure()
    return document


@contextlib.contextmanager
def _drivers(plan: RpcPlan, left_out: dict[str, str], tell: Tell) -> Iterator[dict[str, Driver]]:
    """Start all drivers at once; those whose library is missing are left out."""
    drivers: dict[str, Driver] = {}
    try:
        for name in plan.transports:
            try:
                drivers[name] = Driver(name, plan.pythons.get(name, sys.executable))
            except TransportMissingError as error:
                left_out[name] = str(error)
        for name in list(drivers):
            try:
                drivers[name].opened()
            except (TransportMissingError, TransportFailedError) as error:
                if name == OURS:
                    raise
                left_out[name] = str(error)
                drivers.pop(name).close()
        for name, why in left_out.items():
            tell(f"{name} is left out: {why}")
        yield drivers
    finally:
        for driver in drivers.values():
            driver.close()


class _Group:
    """All transports with the same number of workers."""

    def __init__(
        self, workers: int, plan: RpcPlan, drivers: dict[str, Driver], document: Document
    ) -> None:
        self._workers = workers
        self._plan = plan
        self._drivers = drivers
        self._document = document

    def measure(self) -> None:
        """Start the workers, measure everything, end them."""
        self._each(lambda driver: driver.start(self._workers))
        self._each(lambda driver: driver.settle())  # some spin as soon as they are started
        for size in self._plan.sizes:
            for mode in ("busy", "sporadic"):
                self._measure_cell(size, mode)
        self._measure_idle()
        self._each(lambda driver: driver.stop())

    def _each(self, do: Callable[[Driver], object], order: Sequence[str] = ()) -> None:
        """Do something with each driver; one that fails is left out."""
        for name in order or tuple(self._drivers):
            if name not in self._drivers:
                continue
            try:
                do(self._drivers[name])
            except TransportFailedError as error:
                if name == OURS:
                    raise
                self._document["left_out"][name] = str(error)
                self._drivers.pop(name).close()

    def _measure_cell(self, size: int, mode: str) -> None:
        plan, names = self._plan, tuple(self._drivers)
        times: dict[str, list[int]] = {name: [] for name in names}
        spent: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
        how = {"warm_ups": 10, "calls": plan.most_calls, "seconds": plan.seconds, "every": 0.0}
        if mode == "sporadic":
            seconds = plan.calls * 2 * SPORADIC_EVERY
            how = {"warm_ups": 2, "calls": plan.calls, "seconds": seconds, "every": SPORADIC_EVERY}

        def take(driver: Driver) -> None:
            before = driver.cpu_seconds()
            turn = driver.tell("turn", size=size, **how)
            spent[driver.name].append((driver.cpu_seconds() - before, turn["calls"]))
            times[driver.name] += turn["times"]
            driver.settle()

        for number in range(plan.rounds):
            self._each(take, names if number % 2 == 0 else names[::-1])
        for name in names:
            if name in self._drivers:
                self._document["rows"].append(
                    {"transport": name, "workers": self._workers, "bytes": size, "mode": mode}
                    | _figures(times[name], spent[name])
                )

    def _measure_idle(self) -> None:
        """Have each make some calls, and watch what all its processes use from then on, all
        transports over the same time.
        """
        begun: dict[str, tuple[float, float]] = {}
        how = {"warm_ups": 0, "calls": IDLE_CALLS, "seconds": 10.0, "every": 0.0}

        def begin(driver: Driver) -> None:
            ended = driver.tell("turn", size=self._plan.sizes[0], **how)["ended"]
            time.sleep(max(0.0, ended + IDLE_FROM - time.monotonic()))
            begun[driver.name] = (time.monotonic(), driver.cpu_seconds())

        def end(driver: Driver) -> None:
            start, before = begun[driver.name]
            time.sleep(max(0.0, start + self._plan.idle_seconds - time.monotonic()))
            window = time.monotonic() - start
            self._document["idle"].append(
                {
                    "transport": driver.name,
                    "workers": self._workers,
                    "cpu_share": (driver.cpu_seconds() - before) / window,
                    "window_s": round(window, 3),
                }
            )

        self._each(begin)
        self._each(end)


def _figures(times: Sequence[int], spent: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return a row's figures from the times of its calls in ns and (CPU s, calls) of each turn."""
    ordered = sorted(times)
    seconds = sum(cpu for cpu, _ in spent)
    return {
        "median_us": round(statistics.median(ordered) / 1e3, 2),
        "p99_us": round(ordered[math.ceil(0.99 * len(ordered)) - 1] / 1e3, 2),
        "cpu_s_per_call": seconds / sum(calls for _, calls in spent),
    }
