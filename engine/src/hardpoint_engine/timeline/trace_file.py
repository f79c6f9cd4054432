"""A file of trace events that is a whole JSON document at every moment, whoever ends the process.

Events are gathered and written with the document's end after them, over the end that was there.
Where a file cannot be written anywhere but at its end (a pipe), only closing makes it whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

HEAD = b'{"displayTimeUnit": "ms", "traceEvents": ['
TAIL = b"\n]}\n"
MOST_BYTES = 1 << 16
"""Bytes of events that are gathered."""
MOST_SECONDS = 0.1
"""How long an event is kept back while others come."""


class TraceFile:
    """Used on one thread at a time. All methods raise OSError."""

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.lseek(self._handle, 0, os.SEEK_SET)
            self._seekable = True
        except OSError:
            self._seekable = False
        self._kept = bytearray(HEAD)
        self._first = True
        self._end = 0
        self._written = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event; it is written soon."""
        self._kept += (b"\n" if self._first else b",\n") + json.dumps(event).encode()
        self._first = False
        if len(self._kept) >= MOST_BYTES or time.monotonic() - self._written >= MOST_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is kept back."""
        kept, self._kept = self._kept, bytearray()
        self._written = time.monotonic()
        if not self._seekable:
            self._put(kept)
            return
        try:
            self._put(kept + TAIL)
        except OSError:
            with contextlib.suppress(OSError):  # what was there is a document again
                os.ftruncate(self._handle, self._end)
                self._put(TAIL)
            raise
        self._end += len(kept)

    def close(self) -> None:
        """Complete the file. Idempotent."""
        if self._handle < 0:
            return
        try:
            self.flush()
            if not self._seekable:
                self._put(TAIL)
        finally:
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _put(self, data: bytes | bytearray) -> None:
        """Write all of ``data``, where the document's end is."""
        left, at = memoryview(data), self._end
        while left:
            written = (
                os.pwrite(self._handle, left, at)
                if self._seekable
                else os.write(self._handle, left)
            )
            left, at = left[written:], at + written
