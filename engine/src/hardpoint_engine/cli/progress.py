"""A line on standard error that says how far a command has come; only at a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

EVERY = 0.1
"""Seconds between two states that are shown, at least."""
LEAST_BAR = 10


class Progress:
    """Counts to ``total``; ``done`` were there before. ``failed`` are shown if there are any."""

    def __init__(self, total: int, done: int, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._shown = self._out.isatty()
        self._total, self._before, self._done = total, done, done
        self._tokens = 0
        self._begun = time.monotonic()
        self._last = 0.0

    def add(self, tokens: int) -> None:
        """Count one more, which gave so many tokens."""
        self._done += 1
        self._tokens += tokens
        now = time.monotonic()
        if self._shown and (now - self._last >= EVERY or self._done == self._total):
            self._last = now
            self._out.write("\r" + self.line(now - self._begun, _columns()))
            self._out.flush()

    def line(self, seconds: float, columns: int) -> str:
        """Return the state after so many seconds, ``columns`` wide."""
        share = self._done / self._total if self._total else 1.0
        rate = self._tokens / seconds if seconds > 0 else 0.0
        fresh = self._done - self._before
        left = (self._total - self._done) * seconds / fresh if fresh else None
        rest = "--:--:--" if left is None else _clock(left)
        facts = f" {self._done}/{self._total} {share:4.0%} {rate:.0f} tokens/s, {rest} left"
        width = columns - len(facts) - 3
        if width < LEAST_BAR:
            return facts.strip().ljust(columns - 1)[: columns - 1]
        full = int(width * share)
        return f"[{'#' * full}{'.' * (width - full)}]{facts}"

    def close(self) -> None:
        """End the line."""
        if self._shown and self._last:
            self._out.write("\n")
            self._out.flush()


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _clock(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}"
