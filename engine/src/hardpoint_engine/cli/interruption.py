"""Ctrl-C and SIGTERM in a command: back at the prompt within a second, whatever a thread is doing.

The main thread gets an exception, so that everything is closed on the way out. A worker thread in
the middle of an import or a kernel cannot be stopped, and closing waits for it; so from the first
signal on, time is short: after ``GRACE`` the process ends as it is.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

GRACE = 0.25
"""Seconds from the signal to the end. The import of a big library may hold the interpreter, and so
the signal, for about as long again.
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to end; ``exit_code`` is 128 + its number, as shells say it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in SIGNALS:
        signal.signal(other, _end_now)
    # Not threading.Thread: this may have interrupted its own bookkeeping, whose lock is not free.
    _thread.start_new_thread(_end_later, (128 + number,))
    raise Interrupted(number)


def _end_now(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _end_later(exit_code: int) -> None:
    time.sleep(GRACE)
    os._exit(exit_code)


@contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Let each SIGINT in the block raise KeyboardInterrupt and end nothing by itself. Within
    ``interruptible``, in the main thread; an ignored signal stays ignored.
    """
    with _handled((signal.SIGINT,), signal.default_int_handler):
        yield


@contextmanager
def interruptions() -> Iterator[None]:
    """Let each SIGINT or SIGTERM in the block raise Interrupted and end nothing by itself, for as
    long as that takes. In the main thread; an ignored signal stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    with _handled(SIGNALS, interrupt):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM in the block into Interrupted and the end of the process.

    Does nothing outside the main thread, where Python delivers no signals. A signal that was
    ignored from outside (``nohup``, a shell's background job) stays ignored.
    """
    with _handled(SIGNALS, _interrupt):
        try:
            yield
        except Interrupted as error:
            os._exit(error.exit_code)


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Have ``handler`` get these signals in the block, those that are not ignored; does nothing
    outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
