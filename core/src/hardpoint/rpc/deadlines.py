"""Deadlines of calls that nobody waits for: one thread for all of them."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable


class Deadlines:
    """Calls ``expire(call_id)`` when a call's deadline has passed.

    The thread is started by the first deadline and ends when none is left, or by :meth:`close`.
    Thread-safe.
    """

    def __init__(self, expire: Callable[[int], None]) -> None:
        self._expire = expire
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, deadline: float, call_id: int) -> None:
        """Expire ``call_id`` at ``deadline`` (monotonic s), whether it is answered by then or not
        (expiring an answered call does nothing).
        """
        with self._condition:
            if self._closed:
                return
            heapq.heappush(self._heap, (deadline, call_id))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="hardpoint-deadlines", daemon=True
                )
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """Forget all deadlines; the thread ends. Idempotent."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()

    def _watch(self) -> None:
        while True:
            with self._condition:
                if not self._heap:
                    self._thread = None
                    return
                deadline, call_id = self._heap[0]
                wait = deadline - time.monotonic()
                if wait > 0:
                    self._condition.wait(wait)
                    continue
                heapq.heappop(self._heap)
            self._expire(call_id)
