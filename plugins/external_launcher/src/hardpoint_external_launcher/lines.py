"""Lines between the processes: for each pair of one host two pipes, which have no name and listen
nowhere; towards another host :mod:`hardpoint_external_launcher.abroad` has their other ends.

Each process makes a pipe for every peer and tells where its writing end stands among its own
descriptors; the peer opens that through ``/proc/PID/fd/N``, as the system lets a process of the
same user do. So nothing is left behind, whatever dies, and no other user can write.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from hardpoint.errors import ExecutorFailedError, WorkerDiedError

from hardpoint_external_launcher.frames import Buffer, Frame, FrameError, Reading

READ = 1 << 18
"""Bytes that are read at once."""
PIPE_BYTES = 1 << 18
"""Bytes that a pipe holds, where the system allows as many."""
LOOK_MS = 50
"""Milliseconds between two looks at whether a writer that waits must stop."""
_F_SETPIPE_SZ = 1031


class ClosedLineError(Exception):
    """The peer cannot be written to any more."""


class Line:
    """One peer. Frames may be sent from any thread; one thread reads."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.host = ""
        """Where the peer is, if on another host."""
        self.busy = (0.0, 0.0)
        """Since when a peer on another host was busy, by its clock and by this host's."""
        self.left: str | None = None
        """Why the peer ended its part, once it did; empty if it was done."""
        self._read, self._given = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            import fcntl

            fcntl.fcntl(self._given, _F_SETPIPE_SZ, PIPE_BYTES)
        self._write = -1
        self._life = -1
        self._frames = Reading()
        self._lock = threading.Lock()
        self._stopped = False

    def carried(self) -> tuple[int, int]:
        """Return the other ends, which are the caller's: the one to read what is sent from, and the
        one to write what is heard to.
        """
        given, self._given = self._given, -1
        read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return read, given

    @property
    def offer(self) -> int:
        """The descriptor that the peer is to write to."""
        return self._given

    def connect(self, pid: int, born: int, descriptor: int) -> None:
        """Open what the peer offers. Raises WorkerDiedError if it is gone."""
        self.pid = pid
        try:
            self._life = os.pidfd_open(pid)
            if born_at(pid) != born:
                raise ProcessLookupError
            self._write = opened(pid, descriptor, os.O_WRONLY | os.O_NONBLOCK, "pipe:")
        except PermissionError as error:
            raise shielded(pid, self.rank, error) from error
        except OSError as error:
            raise WorkerDiedError(rank=self.rank, pid=pid, exit=None) from error

    def connected(self) -> None:
        """The peer has opened the offer."""
        with self._lock:
            given, self._given = self._given, -1
        if given >= 0:
            os.close(given)

    # Waiting.

    def watch(self, poll: select.poll) -> dict[int, bool]:
        """Register with ``poll``; return descriptor -> whether it is that of the peer's life."""
        poll.register(self._read, select.POLLIN)
        found = {self._read: False}
        if self._life >= 0:
            poll.register(self._life, select.POLLIN)
            found[self._life] = True
        return found

    def receive(self) -> tuple[list[Frame], bool]:
        """Return what has arrived, and whether more may come."""
        try:
            data = os.read(self._read, READ)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        if not data:
            return [], self._given >= 0  # nobody has opened it yet
        try:
            return self._frames.take(data), True
        except FrameError as error:
            self.left = f"what it sent is no frame: {error}"
            return [], False

    # Sending.

    def send(self, frame: Frame, *, patient: bool = True) -> None:
        """Send a frame; waits for room unless not ``patient``: it is left out then. Raises
        ClosedLineError.
        """
        if not self._lock.acquire(blocking=patient):
            return
        try:
            self._put(frame.pieces(), patient)
        finally:
            self._lock.release()

    def _put(self, pieces: Sequence[Buffer], patient: bool) -> None:
        waiting = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
        while waiting:
            if self._stopped or self._write < 0:
                raise ClosedLineError(self.rank)
            try:
                count = os.writev(self._write, waiting[:64])
            except BlockingIOError:
                if not patient:
                    return
                _wait_for_room(self._write)
                continue
            except OSError as error:
                raise ClosedLineError(self.rank) from error
            patient = True  # what is begun must be ended
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = waiting[0][count:]

    def stop(self) -> None:
        """Have whoever waits for room stop."""
        self._stopped = True

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.stop()
        with self._lock:
            held = [self._read, self._given, self._write, self._life]
            self._read = self._given = self._write = self._life = -1
        for descriptor in held:
            if descriptor >= 0:
                os.close(descriptor)


def opened(pid: int, descriptor: int, flags: int, kind: str) -> int:
    """Open what another process has as ``descriptor``, if the name of what it is begins with
    ``kind``. Raises OSError, for anything else, too.
    """
    place = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(place).startswith(kind):  # noqa: PTH115 - its text is what counts
        raise FileNotFoundError(f"{place} is another thing")
    return os.open(place, flags | os.O_CLOEXEC)


def shielded(pid: int, rank: int, error: OSError) -> ExecutorFailedError:
    """Return the error of a process that this one may not look into."""
    return ExecutorFailedError(
        f"process {pid} of rank {rank} may not be looked into ({error}): all processes must be of "
        "one user, and not be shielded from it"
    )


def _wait_for_room(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(LOOK_MS)


def born_at(pid: int) -> int:
    """Return when process ``pid`` began, in clock ticks since the system did: with the number, a
    name that no other process has. Raises ProcessLookupError, for one that has ended, too.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            words = file.read().rpartition(")")[2].split()
        if words[0] in "ZX":  # it waits for its parent to hear of it
            raise ProcessLookupError(f"process {pid} has ended")
        return int(words[19])
    except (OSError, ValueError, IndexError) as error:
        raise ProcessLookupError(f"no process {pid}") from error


def settle(condition: Callable[[], bool], deadline: float, pause: float = 0.005) -> bool:
    """Wait until ``condition()`` or ``deadline`` (monotonic s); return which."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
