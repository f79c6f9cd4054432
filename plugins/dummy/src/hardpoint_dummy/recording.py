"""The record of calls that tests look at."""

from __future__ import annotations

from collections import deque

_MOST = 100_000


class Recorder:
    """Keeps the last 100,000 calls."""

    def __init__(self) -> None:
        self._calls: deque[tuple[str, object]] = deque(maxlen=_MOST)

    def __call__(self, name: str, detail: object = None) -> None:
        """Note a call."""
        self._calls.append((name, detail))

    @property
    def calls(self) -> tuple[tuple[str, object], ...]:
        """The calls, first to last."""
        return tuple(self._calls)
