"""Faults on demand: named points in the driver, nursery and workers, at which a test makes it fail.

A point is one line, ``fault("reply.before_send", rank)``, and passes unless the process was started
with ``HARDPOINT_FAULTS``, which only tests set: a folder, a colon, and the faults as
:func:`parse_faults` reads them. Every passage of a point that a fault names, and every fault that
fires, is written to that folder, so that a test can tell from outside that its fault fired
(:func:`fired`): one that did not shows nothing.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from hardpoint.errors import HardpointError

VARIABLE = "HARDPOINT_FAULTS"

POINTS = frozenset(
    {
        "call.before_send",
        "call.after_send",
        "worker.received",
        "worker.before_ready",
        "reply.before_send",
        "reply.after_send",
        "nursery.before_fork",
        "nursery.idle",
        "heartbeat",
        "save.commit",
        "shutdown.driver",
        "shutdown.worker",
    }
)
"""The points there are: who passes each stands in the name. ``shutdown.driver`` is passed before
the workers are asked to shut down, ``shutdown.worker`` before a worker does, ``nursery.idle`` each
time the nursery begins to wait for an order, ``save.commit`` by the driver before each step of
putting a sharded state in its place.
"""

LOSE, DUPLICATE = "lose", "duplicate"
"""What a point returns whose message is to be dropped, or sent twice; other points ignore it."""

KINDS = (
    "raise", "memory_error", "exit", "kill", "stop", "hang", "ignore_term", LOSE, DUPLICATE,
)  # fmt: skip
EXIT_CODE = 7
FOREVER = 3600.0

_FORM = re.compile(r"(?P<point>[\w.]+)(:(?P<nth>\d+))?(@(?P<rank>\d+))?(=(?P<kind>\w+))?")
_PASSED, _FIRED = "passed", "fired"


class InjectedFaultError(HardpointError):
    """What a fault of the kind ``raise`` raises: the point, which passage of it, and the rank.

    What to do: nothing: a test asked for it.
    """

    def __init__(self, point: str, nth: int, rank: int | None) -> None:
        whose = "" if rank is None else f", rank {rank}"
        super().__init__(f"injected fault: {point}, passage {nth}{whose}")
        self.point, self.nth, self.rank = point, nth, rank


@frozen(kw_only=True)
class Fault:
    """Fail at the ``nth`` passage (from 1) of ``point``, on ``rank`` or on any (None)."""

    point: str
    nth: int = 1
    rank: int | None = None
    kind: str = "raise"


def parse_faults(
    text: str, points: Collection[str] = POINTS, kinds: Collection[str] = KINDS
) -> tuple[Fault, ...]:
    """Return the faults of ``text``: ``POINT[:NTH][@RANK][=KIND]``, by commas. Raises ValueError
    saying what is wrong with it.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(_parse(part, points, kinds) for part in parts)


def _parse(part: str, points: Collection[str], kinds: Collection[str]) -> Fault:
    match = _FORM.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is not of the form POINT[:NTH][@RANK][=KIND]")
    point, kind = match["point"], match["kind"] or "raise"
    if point not in points:
        raise ValueError(f"{point!r} is no fault point; known: {', '.join(sorted(points))}")
    if kind not in kinds:
        raise ValueError(f"{kind!r} is no kind of fault; known: {', '.join(kinds)}")
    rank = match["rank"]
    return Fault(
        point=point,
        nth=int(match["nth"] or 1),
        rank=None if rank is None else int(rank),
        kind=kind,
    )


def strike(kind: str) -> str:
    """Do to this process what ``kind`` says, except ``raise``, which is the caller's; return what
    is to be done to its message, if anything.
    """
    if kind == "memory_error":
        raise MemoryError("injected fault: out of memory")
    if kind == "exit":
        os._exit(EXIT_CODE)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        time.sleep(FOREVER)
    if kind == "ignore_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return kind if kind in (LOSE, DUPLICATE) else ""


class FaultPoints:
    """The points of one process: all of them pass unless a plan says otherwise.

    ``plan`` is what the variable holds; None or empty for none.
    """

    def __init__(self, plan: str | None = None) -> None:
        self.active = False
        """Whether there is a plan: what a point on the hot path looks at first."""
        self._faults: tuple[Fault, ...] = ()
        self._folder = ""
        self._passed: Counter[tuple[str, int | None]] = Counter()
        self.plan(plan)

    def plan(self, plan: str | None) -> None:
        """Have faults from now on, by a new plan; called by tests in their own process."""
        folder, _, text = (plan or "").partition(":")
        self._faults = parse_faults(text)
        self._folder = folder
        self._passed.clear()
        self.active = bool(self._faults)

    def __call__(self, point: str, rank: int | None = None) -> str:
        """Pass ``point``: raise, or end, or return LOSE, DUPLICATE or ``""``, as is planned."""
        return self._pass(point, rank) if self.active else ""

    def _pass(self, point: str, rank: int | None) -> str:
        if point not in POINTS:
            raise ValueError(f"{point!r} is no fault point; known: {', '.join(sorted(POINTS))}")
        due = [f for f in self._faults if f.point == point and f.rank in (None, rank)]
        if not due:
            return ""
        self._passed[point, rank] += 1
        nth = self._passed[point, rank]
        self._write(_PASSED, point)
        outcome = ""
        for each in due:
            if each.nth == nth:
                self._write(_FIRED, point)
                if each.kind == "raise":
                    raise InjectedFaultError(point, nth, rank)
                outcome = strike(each.kind) or outcome
        return outcome

    def _write(self, what: str, point: str) -> None:
        append(self._folder, f"{what}-{point}")


def append(folder: str, name: str) -> None:
    """Count one more of ``name`` in ``folder``: one byte, which no other process can tear."""
    path = os.path.join(folder, name)  # noqa: PTH118 - no module more for the hot path
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, b".")
    finally:
        os.close(descriptor)


def _count(folder: str | Path, name: str) -> int:
    path = Path(folder, name)
    return path.stat().st_size if path.exists() else 0


def passed(folder: str | Path, point: str) -> int:
    """Return how often ``point`` was passed, in all processes together."""
    return _count(folder, f"{_PASSED}-{point}")


def fired(folder: str | Path, point: str) -> int:
    """Return how often a fault fired at ``point``, in all processes together."""
    return _count(folder, f"{_FIRED}-{point}")


fault = FaultPoints(os.environ.get(VARIABLE))
"""This process's points. A test's own switch, not an engine's state."""


@contextmanager
def faults(folder: str | Path, plan: str) -> Iterator[None]:
    """Have ``plan``'s faults in this process and in those that it starts, for a ``with`` block;
    used by tests alone. Raises AssertionError at its end for a fault whose point was not hit.
    """
    named = parse_faults(plan)
    value = f"{folder}:{plan}"
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    fault.plan(value)
    try:
        yield
    finally:
        fault.plan(before)
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    if unhit := sorted({each.point for each in named if not fired(folder, each.point)}):
        raise AssertionError(f"no fault fired at {', '.join(unhit)}: this run shows nothing")
