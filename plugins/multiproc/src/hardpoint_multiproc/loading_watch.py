"""Whether workers that take their devices or load the model come any further. No I/O.

Such calls may rightly take minutes, so their time alone tells nothing. A worker that loads uses the
processor, if only to copy what it waits for; one that hangs uses none.
"""

from __future__ import annotations

WATCHED = frozenset({"init_device", "load_model"})
"""The calls of a start, beside which a worker has nothing to do."""

LEAST_SHARE = 0.02
"""Share of one processor, between two signs of life, that counts as progress: less is what a loop
takes that looks for something again and again.
"""


class LoadingWatch:
    """Judges the calls of a start by the signs of life of all workers.

    ``seconds`` is for how long no worker may come further (``plugins.mp.start_timeout``).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._busy: dict[int, str] = {}
        self._last: dict[int, tuple[float, float]] = {}
        """Rank -> (processor time, moment) of its last sign of life."""
        self._progress = 0.0

    def heard(self, rank: int, call: str, work: float, now: float) -> None:
        """A worker reports what it is busy with (empty: nothing), and its processor time so far."""
        before = self._busy.pop(rank, "")
        if call not in WATCHED:
            call = ""
        else:
            self._busy[rank] = call
        last_work, last = self._last.get(rank, (work, now))
        self._last[rank] = work, now
        worked = work - last_work
        if call != before or (worked > 0 and worked >= LEAST_SHARE * (now - last)):
            self._progress = now

    def stuck(self, now: float) -> dict[int, str]:
        """Return rank -> call of the workers that are at a call of the start, if none has come
        further for too long; else nothing.
        """
        return dict(self._busy) if self._busy and now - self._progress >= self._seconds else {}

    def since(self, now: float) -> float:
        """Return for how many seconds no worker has come further."""
        return now - self._progress
