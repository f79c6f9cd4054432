"""Simulated time: a queue of events, the soonest first, and the one source of chance."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from attrs import define, field

LONGEST = 600.0
"""Simulated seconds after which a wait without a deadline is a defect of the test."""

_TOLD = 30


class SimulationError(AssertionError):
    """An expectation that a simulated run did not meet; its text has the seed, the time and the
    last events.
    """


@define(order=True)
class Event:
    """Something that happens at ``when``, unless it is cancelled."""

    when: float
    order: int
    what: str = field(order=False)
    action: Callable[[], None] = field(order=False)
    cancelled: bool = field(default=False, order=False)

    def cancel(self) -> None:
        """Have it not happen."""
        self.cancelled = True


class Simulation:
    """Time (:attr:`now`, seconds from 0), chance (:attr:`random`) and the record of one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)  # noqa: S311 - it is to be repeated
        self.now = 0.0
        self.trace: list[str] = []
        """What happened, a line each: equal for equal seeds."""
        self._events: list[Event] = []
        self._order = itertools.count()

    def clock(self) -> float:
        """Return the time; what an executor has as its clock."""
        return self.now

    def after(self, delay: float, what: str, action: Callable[[], None]) -> Event:
        """Have ``action()`` happen in ``delay`` seconds; ``what`` tells it in the trace (empty: it
        is not told).
        """
        event = Event(
            when=self.now + max(0.0, delay), order=next(self._order), what=what, action=action
        )
        heapq.heappush(self._events, event)
        return event

    def note(self, what: str) -> None:
        """Write a line of the trace."""
        self.trace.append(f"{self.now:.6f} {what}")

    def run(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Let things happen until ``done()`` or ``deadline``; return whether it is done. Raises
        SimulationError if there is no deadline and it never is.
        """
        last = self.now + LONGEST if deadline is None else deadline
        while not done():
            if not self._events or self._events[0].when > last:
                if deadline is None:
                    raise self.failure("a wait without a deadline never ends")
                self.now = max(self.now, deadline)
                return False
            event = heapq.heappop(self._events)
            if not event.cancelled:
                self.now = max(self.now, event.when)
                if event.what:
                    self.note(event.what)
                event.action()
        return True

    def advance(self, seconds: float) -> None:
        """Let things happen for ``seconds``."""
        self.run(lambda: False, self.now + seconds)

    def failure(self, text: str) -> SimulationError:
        """Return an error that tells ``text``, and by which seed it is seen again."""
        told = "\n  ".join(self.trace[-_TOLD:])
        return SimulationError(f"seed {self.seed}, at {self.now:.6f} s: {text}\n  {told}")

    def expect(self, condition: object, text: str) -> None:
        """Raise SimulationError with ``text`` unless ``condition`` holds."""
        if not condition:
            raise self.failure(text)
