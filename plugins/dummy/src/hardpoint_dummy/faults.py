"""Faults on demand: named points at which the fake device fails, each counted."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable

from attrs import frozen

POINTS = ("build", "init_device", "load", "warm_up", "step", "sample")
KINDS = ("raise", "exit", "hang")
EXIT_CODE = 7

_FORM = re.compile(r"(?P<point>\w+)(:(?P<nth>\d+))?(@(?P<rank>\d+))?(=(?P<kind>\w+))?")


class DummyFault(ValueError):  # noqa: N818 - it is the fault itself that is raised
    """What an injected fault raises: the point, which passage of it, and the rank."""

    def __init__(self, point: str, nth: int, rank: int) -> None:
        super().__init__(point, nth, rank)
        self.point, self.nth, self.rank = point, nth, rank

    def __str__(self) -> str:
        return f"injected fault: {self.point}, passage {self.nth}, rank {self.rank}"


@frozen(kw_only=True)
class Fault:
    """Fail at the ``nth`` passage (from 1) of ``point``, on ``rank`` or on any (None)."""

    point: str
    nth: int = 1
    rank: int | None = None
    kind: str = "raise"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults that ``plugins.dummy.fail_at`` describes; raise ValueError saying what is
    wrong with it.
    """
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(part: str) -> Fault:
    match = _FORM.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is not of the form POINT[:NTH][@RANK][=KIND]")
    point, kind = match["point"], match["kind"] or "raise"
    if point not in POINTS:
        raise ValueError(f"{point!r} is no fault point; known: {', '.join(POINTS)}")
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of fault; known: {', '.join(KINDS)}")
    rank = match["rank"]
    return Fault(
        point=point,
        nth=int(match["nth"] or 1),
        rank=None if rank is None else int(rank),
        kind=kind,
    )


class FaultPoints:
    """One worker's points. ``hang()`` waits until the driver gives the work up."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, hang: Callable[[], None]) -> None:
        self._faults = [fault for fault in faults if fault.rank in (None, rank)]
        self._rank = rank
        self._hang = hang
        self.passed: Counter[str] = Counter()
        """How often each point was passed: a fault that did not fire shows here."""

    def __call__(self, point: str) -> None:
        """Pass ``point``; fail if a fault is due there."""
        self.passed[point] += 1
        for fault in self._faults:
            if fault.point == point and fault.nth == self.passed[point]:
                if fault.kind == "exit":
                    os._exit(EXIT_CODE)
                if fault.kind == "hang":
                    self._hang()
                raise DummyFault(point, fault.nth, self._rank)
