"""A driver's wish to end a step, as the library reads it within an operation."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final, Self

LOOKS: Final = 0.05
"""Seconds between two looks at what the driver wants."""


class Watch:
    """Looks, on a thread of its own, whether the driver has ended the step, while one long call
    computes: ``with watch: ...``. Used by one call at a time.

    ``address``: of the number that the library reads, an int32 that is not 0 from then on.
    """

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._ended = ctypes.c_int32(0)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.address = ctypes.addressof(self._ended)

    def __enter__(self) -> Self:
        self._over.clear()
        self._thread = threading.Thread(target=self._look, name="hardpoint-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._ended.value = 0

    def _look(self) -> None:
        while not self._over.wait(LOOKS):
            if self._cancelled():
                self._ended.value = 1
                return
