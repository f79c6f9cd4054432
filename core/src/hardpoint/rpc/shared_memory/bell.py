"""Waking a process that sleeps, and only one that sleeps.

Who is about to sleep raises a flag in shared memory, passes a full fence, looks again, and blocks
on an eventfd. Who has written passes a fence too and looks at the flag; so at least one sees the
other. Should a wake-up be lost all the same, every sleep ends after SAFETY_S.
"""

from __future__ import annotations

import os
import select
import threading

SAFETY_S = 1.0


def make_event() -> int:
    """Return a new eventfd that does not block."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class Event:
    """An eventfd to sleep on and to wake by. Several may wake; one thread sleeps."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()  # a number that was closed may be another file's already
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._counted = False

    def wake(self) -> None:
        """Let the sleeper go on. Any thread; nothing once it is closed."""
        with self._lock:
            if self.fd >= 0:
                try:
                    os.eventfd_write(self.fd, 1)
                except BlockingIOError:
                    return  # the count is full: awake it is

    def sleep(self, timeout: float | None) -> None:
        """Sleep until woken, for ``timeout`` seconds, or SAFETY_S, whichever is least.

        A wake-up stays counted until the next sleep, which takes it away and ends at once: what was
        waited for comes first. So whoever sleeps looks again, and sleeps again.
        """
        if self._counted:
            self._counted = False
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                return
            return
        seconds = SAFETY_S if timeout is None else min(timeout, SAFETY_S)
        self._counted = bool(self._poll.poll(max(0.0, seconds) * 1000))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            fd, self.fd = self.fd, -1  # first: compiled code rings it without this lock
            if fd >= 0:
                os.close(fd)
