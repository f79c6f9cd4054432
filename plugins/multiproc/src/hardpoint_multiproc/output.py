"""What workers print: line by line on to the driver's standard error, and the last lines kept."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable

KEPT_LINES = 20
"""Last lines of each worker that are kept, for the error that tells of its end."""

LONGEST_LINE = 4096
"""Bytes after which a line is broken."""

_CHUNK = 1 << 16


class _Stream:
    """One worker's output: the descriptor it is read from, and what is known of it."""

    def __init__(self, key: int, fd: int, label: str) -> None:
        self.key = key
        self.fd = fd
        self.label = label
        self.rest = b""
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self.ended = False


class Output:
    """Reads the workers' output on a thread of its own: a driver whose standard error is not read
    for a while must not keep the workers from being watched.
    """

    told: Callable[[int, list[str]], None] | None = None
    """Called besides with each worker's key and lines, as they come; it may not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}
        self._poll = select.poll()
        self._bell = -1
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hardpoint-mp-output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        with self._lock:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._bell, select.POLLIN)
        self._thread.start()

    def add(self, key: int, label: str) -> int:
        """Return a descriptor for the worker ``key`` to write to; the caller closes it. ``label``
        precedes each of its lines.
        """
        read, write = os.pipe()
        os.set_blocking(read, False)
        with self._lock:
            old = self._streams.pop(key, None)
            if old is not None:
                self._give_back(old)
            self._streams[key] = _Stream(key, read, label)
            self._poll.register(read, select.POLLIN)
            self._ring()
        return write

    def rename(self, key: int, label: str) -> None:
        """Let ``label`` precede the lines of ``key`` from now on."""
        with self._lock:
            if key in self._streams:
                self._streams[key].label = label

    def last_lines(self, key: int) -> tuple[str, ...]:
        """Return the last lines of worker ``key``, all that it has written until now included."""
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                return ()
            lines = self._read(stream)
            rest = [stream.rest.decode(errors="replace")] if stream.rest else []
            last = [*stream.last, *rest][-KEPT_LINES:]
        self._show(lines)
        return tuple(last)

    def close(self, within: float) -> None:
        """Show what is still there, and give everything back. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ring()
            if self._bell < 0:  # nobody reads
                self._end()
        if self._thread.ident is not None:
            self._thread.join(within)

    def _ring(self) -> None:
        """Have the thread look; it polls what there was when it began to."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while True:
            self._poll.poll()
            lines: list[str] = []
            with self._lock:
                for stream in self._streams.values():
                    lines += self._read(stream)
                closed = self._closed
                if closed:
                    lines += self._end()
                else:
                    _empty(self._bell)
            self._show(lines)
            if closed:
                return

    def _read(self, stream: _Stream) -> list[str]:
        """Take what is there; return the whole lines, labelled."""
        texts: list[str] = []
        while not stream.ended:
            try:
                data = os.read(stream.fd, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                self._give_back(stream)
                data = b"\n" if stream.rest else b""
            *whole, rest = (stream.rest + data).split(b"\n")
            *broken, stream.rest = _broken(rest)
            for line in (*(part for each in whole for part in _broken(each)), *broken):
                text = line.decode(errors="replace")
                stream.last.append(text)
                texts.append(text)
        if texts and self.told is not None:
            self.told(stream.key, texts)
        return [f"({stream.label}) {text}\n" for text in texts]

    def _end(self) -> list[str]:
        lines = [
            f"({stream.label}) {stream.rest.decode(errors='replace')}\n"
            for stream in self._streams.values()
            if stream.rest
        ]
        for stream in self._streams.values():
            self._give_back(stream)
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
        return lines

    def _give_back(self, stream: _Stream) -> None:
        if not stream.ended:
            stream.ended = True
            self._poll.unregister(stream.fd)
            os.close(stream.fd)

    @staticmethod
    def _show(lines: list[str]) -> None:
        if not lines:
            return
        try:
            sys.stderr.write("".join(lines))
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # a stream that is closed, or none at all
            return


def _broken(line: bytes) -> list[bytes]:
    """Return a line in parts of at most LONGEST_LINE bytes; the last has what is left."""
    starts = range(0, len(line) or 1, LONGEST_LINE)
    return [line[start : start + LONGEST_LINE] for start in starts]


def _empty(bell: int) -> None:
    try:
        os.eventfd_read(bell)
    except BlockingIOError:
        return
