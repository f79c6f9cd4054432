"""What this process does at a signal, kept while a library sets it otherwise."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

ROOM = 256
"""Bytes that hold the C library's ``struct sigaction``, whatever is in it."""


@contextlib.contextmanager
def kept(signals: Sequence[int]) -> Iterator[None]:
    """Restore the actions of ``signals`` afterwards, those of C too, on whichever thread: Python's
    own way needs the main one, and knows of none but its own.
    """
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = {number: ctypes.create_string_buffer(ROOM) for number in signals}
    for number, action in before.items():
        if sigaction(number, None, action):
            raise OSError(ctypes.get_errno(), f"signal {number} has no action to keep")
    try:
        yield
    finally:
        for number, action in before.items():
            sigaction(number, action, None)
