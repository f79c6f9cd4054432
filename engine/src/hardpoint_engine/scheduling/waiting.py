"""The waiting requests, best first: by priority, then by arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hardpoint_engine.request import Phase, Request

_Entry = tuple[int, int, Request]


class WaitingQueue:
    """A heap of requests. Adding and taking cost O(log n). Removal is by changing a request's phase
    and saying so, and costs O(1) on average: the entry goes when it comes up, or when most are
    dead.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def __iter__(self) -> Iterator[Request]:
        """Go through the waiting requests in no particular order."""
        return (entry[2] for entry in self._heap if entry[2].phase is Phase.WAITING)

    def add(self, request: Request) -> None:
        """Let ``request`` wait."""
        request.phase = Phase.WAITING
        heapq.heappush(self._heap, (*request.rank, request))

    def best(self) -> Request | None:
        """Return who is next, or None."""
        heap = self._heap
        while heap and heap[0][2].phase is not Phase.WAITING:
            heapq.heappop(heap)
            self._dead -= 1
        return heap[0][2] if heap else None

    def take(self) -> Request:
        """Remove who is next and return it."""
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request, phase: Phase) -> None:
        """Remove one that waits, by giving it another phase."""
        request.phase = phase
        self._dead += 1
        if self._dead > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].phase is Phase.WAITING]
            heapq.heapify(self._heap)
            self._dead = 0
