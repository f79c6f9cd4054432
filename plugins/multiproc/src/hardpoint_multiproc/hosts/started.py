"""One worker of a follower: what it lives by, and its stacks and output for the leader."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from attrs import define, field
from hardpoint.rpc.claims import CallerClaims
from hardpoint.rpc.network.lanes import WorkerLane
from hardpoint.rpc.process_life import is_stopped

from hardpoint_multiproc import descriptors
from hardpoint_multiproc.group import STACK_SECONDS
from hardpoint_multiproc.signals import LAST_STACK_SIGNAL, STACK_SIGNAL

LONGEST_STACK = 1 << 18
"""Bytes of stacks that are told to the leader."""
MOST_OUTPUT = 1 << 16
"""Bytes of one worker's output that wait to be told; further lines are left out."""


@define(eq=False)
class Started:
    """One worker here, and what it lives by. ``stacks`` is the memory for the stacks of its
    threads.
    """

    rank: int
    lane: WorkerLane | None = None
    board: CallerClaims | None = None
    given: list[int] = field(factory=list)
    pid: int = 0
    pidfd: int = -1
    stacks: int = -1
    _begin: int = -1
    _size: int = 0
    _look_at: float = 0.0
    _lock: threading.Lock = field(factory=threading.Lock)

    def ask_for_stack(self, *, last: bool) -> None:
        """Have it write its stacks, and end then if ``last``; a stopped one is continued."""
        if self.pidfd < 0 or self.stacks < 0:
            return
        self._begin = self._size = os.fstat(self.stacks).st_size
        try:
            signal.pidfd_send_signal(self.pidfd, LAST_STACK_SIGNAL if last else STACK_SIGNAL)
            if is_stopped(self.pid):
                signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)
        except OSError:
            self._begin = -1

    @property
    def writes_stack(self) -> bool:
        """Whether its stacks were asked for and are not taken yet."""
        return self._begin >= 0

    def stack(self, *, ended: bool = False) -> str | None:
        """Return the stacks that were asked for, once they grow no more or it has ``ended``; None
        until then, and afterwards. Any thread.
        """
        with self._lock:
            return self._stack(time.monotonic(), ended)

    def _stack(self, now: float, ended: bool) -> str | None:
        if self._begin < 0 or (now < self._look_at and not ended):
            return None
        self._look_at = now + STACK_SECONDS
        size = os.fstat(self.stacks).st_size
        whole = size > self._begin and size == self._size
        self._size = size
        if not (whole or ended):
            return None
        text, self._begin = descriptors.contents(self.stacks)[self._begin :], -1
        return text[:LONGEST_STACK].decode(errors="replace")

    def close(self) -> None:
        """Give everything back. Idempotent."""
        descriptors.close(self.given)
        self.given = []
        for name in ("pidfd", "stacks"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        if self.board is not None:
            self.board.close()


class Told:
    """What workers print, until it is sent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[int, bytearray] = {}
        self._left_out: dict[int, int] = {}

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Add lines of a worker."""
        with self._lock:
            text = self._texts.setdefault(rank, bytearray())
            for line in lines:
                data = line.encode(errors="replace") + b"\n"
                if len(text) + len(data) > MOST_OUTPUT:
                    self._left_out[rank] = self._left_out.get(rank, 0) + 1
                else:
                    text += data

    def take(self) -> list[tuple[int, bytes]]:
        """Return (rank, lines) of all that there is."""
        with self._lock:
            texts, self._texts = self._texts, {}
            left_out, self._left_out = self._left_out, {}
        for rank, count in left_out.items():
            texts[rank] += b"... %d lines are left out: they came too fast\n" % count
        return [(rank, bytes(text)) for rank, text in texts.items()]
