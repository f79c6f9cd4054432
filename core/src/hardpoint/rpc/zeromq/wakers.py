"""Waking a thread that polls descriptors, on any system."""

from __future__ import annotations

import contextlib
import os


class Waker:
    """A pipe whose reading end is polled. Any thread may wake."""

    def __init__(self) -> None:
        self.fd, self._writing = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writing, False)

    def wake(self) -> None:
        """Make ``fd`` readable."""
        with contextlib.suppress(BlockingIOError, OSError):  # it is full, or closed just now
            os.write(self._writing, b"w")

    def clear(self) -> None:
        """Read what was written."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends. Idempotent."""
        if self.fd >= 0:
            reading, self.fd = self.fd, -1
            os.close(reading)
            os.close(self._writing)
