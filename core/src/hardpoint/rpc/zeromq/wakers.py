"""Waking a thread that polls descriptors, on any system."""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """A pipe whose reading end is polled. Any thread may wake."""

    def __init__(self) -> None:
        self.fd, self._writing = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writing, False)
        self._lock = threading.Lock()  # a number that was closed may be another file's already

    def wake(self) -> None:
        """Make ``fd`` readable; nothing once it is closed."""
        with self._lock, contextlib.suppress(BlockingIOError):  # it is full: awake it is
            if self.fd >= 0:
                os.write(self._writing, b"w")

    def clear(self) -> None:
        """Read what was written."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self.fd >= 0:
                os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends. Idempotent."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                os.close(self._writing)
                self.fd = -1
