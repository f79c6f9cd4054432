"""Keeping what is not ours at arm's length: its texts, its prints, its time."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

_R = TypeVar("_R")

LONGEST_TEXT = 65536
"""Characters of a foreign text that are kept; the middle of a longer one is cut."""
_MOMENTS = 50


class _Diversion:
    """Standard output is a fact of the process, so this is too: it may be diverted by several
    threads at once, and comes back with the last of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._kept: Any = None
        self._placed: Any = None

    def begin(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._kept, self._placed = sys.stdout, sys.stderr
                sys.stdout = sys.stderr

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                if sys.stdout is self._placed:  # else somebody set another one meanwhile
                    sys.stdout = self._kept
                self._kept = self._placed = None


_diversion = _Diversion()


@contextmanager
def prints_diverted() -> Iterator[None]:
    """Send what is printed to standard error: standard output is for answers, JSON among them.

    Around a plugin's import, its hooks and its probe. Any number at once, from any thread.
    """
    _diversion.begin()
    try:
        yield
    finally:
        _diversion.end()


def ended_within(seconds: float, function: Callable[[], _R]) -> Future[_R] | None:
    """Run ``function`` on a thread of its own; return its completed future, or None if it did not
    end in time: the thread is left behind then and cannot keep the process from ending.

    The time is waited for in ``_MOMENTS`` parts. A machine too busy to wake this thread gives the
    other one no turn either, so each part becomes as much longer, and nobody is late for it.
    """
    outcome: Future[_R] = Future()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - raised again where it is asked for
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    threading.Thread(target=run, name="hardpoint-probe", daemon=True).start()
    ended = (wait([outcome], seconds / _MOMENTS).done for _ in range(_MOMENTS))
    return outcome if any(ended) else None


def clipped(text: str) -> str:
    """Return ``text``, without its middle (and saying so) if it is longer than LONGEST_TEXT."""
    extra = len(text) - LONGEST_TEXT
    if extra <= 0:
        return text
    half = LONGEST_TEXT // 2
    return (
        f"{text[:half]} ... [{extra} characters are cut here; at most {LONGEST_TEXT} are kept] "
        f"... {text[-half:]}"
    )


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, clipped, whatever its own code raises."""
    try:
        return clipped(str(error))
    except BaseException as broken:  # noqa: BLE001 - another's __str__ may raise anything
        return f"<its __str__ raised {type(broken).__name__}>"


def place_of(error: BaseException) -> str:
    """Return where ``error`` was raised, as `` (file.py, line 12)``; nothing where its text says so
    or only the machinery of imports raised.
    """
    if isinstance(error, SyntaxError):
        return ""
    places = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<frozen ")
        and str(frame.f_globals.get("__name__")).partition(".")[0] not in ("importlib", "hardpoint")
    ]
    return f" ({places[-1][0].name}, line {places[-1][1]})" if places else ""


def traceback_of(error: BaseException) -> str:
    """Return the traceback with its chain, clipped, whatever the exception's own code raises."""
    try:
        return clipped("".join(traceback.format_exception(error)))
    except BaseException as broken:  # noqa: BLE001 - as above
        return (
            f"{type(error).__name__}: {text_of(error)} "
            f"<its traceback cannot be told: {type(broken).__name__}>\n"
        )


def log_error(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Log what ``error`` did, its traceback as text: no formatter runs its own code."""
    logger.error("%s:\n%s", what, traceback_of(error))
