"""One thread that waits for descriptors and for the time, and runs what belongs to them."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from hardpoint.isolation import log_error

_logger = logging.getLogger("hardpoint.executor.mp")


LONGEST_WAIT = 86400.0
"""Seconds that are waited at once; clocks and calls of the system take no number at will."""


def left_until(moment: float) -> float:
    """Return the seconds until ``moment`` (monotonic s) that may be waited at once."""
    return min(max(0.0, moment - time.monotonic()), LONGEST_WAIT)


class Loop:
    """Runs handlers on its own daemon thread, one at a time.

    ``first()`` runs before everything else.
    """

    def __init__(self, name: str, first: Callable[[], None]) -> None:
        self._first = first
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._bell = -1
        self._lock = threading.Lock()
        self._ended = False
        self._tick: Callable[[float], float] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.POLLIN)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Have ``function`` run on the thread soon; any thread. Nothing once it has ended."""
        self._queue.append(function)
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def ask(self, tick: Callable[[float], float]) -> None:
        """Have ``tick(now)`` asked at once and after every turn; it returns when it wants to be
        asked again (monotonic s; inf: when something happens). Any thread.
        """
        self._tick = tick
        self.call(lambda: None)  # the loop may be waiting for something that will not happen

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever ``fd`` is readable or at its end. On the loop's thread."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """Watch ``fd`` no more. On the loop's thread."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def is_current(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def end(self, within: float) -> None:
        """Have the thread end, and wait for it (unless it is the caller). Idempotent."""
        self.call(self._finish)
        if self._thread.ident is None:
            self._finish()
        elif not self.is_current():
            self._thread.join(within)

    def _finish(self) -> None:
        self._handlers.clear()
        with self._lock:
            self._ended = True
            bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    def _run(self) -> None:
        self._guard(self._first)
        due = math.inf
        while True:
            self._drain()
            if self._ended:
                self._queue.clear()
                return
            if self._tick is not None:
                due = self._asked(self._tick)
            left = None if due == math.inf else math.ceil(left_until(due) * 1000)
            for fd, _ in self._poll.poll(left):
                if fd == self._bell:
                    os.eventfd_read(fd)
                elif (handler := self._handlers.get(fd)) is not None:
                    self._guard(handler)

    def _drain(self) -> None:
        while self._queue and not self._ended:
            self._guard(self._queue.popleft())

    @staticmethod
    def _asked(tick: Callable[[float], float]) -> float:
        try:
            return tick(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - the thread must go on
            log_error(_logger, "watching the workers raised", error)
            return time.monotonic() + 1.0

    def _guard(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - as above
            log_error(_logger, "watching the workers raised", error)
