"""Descriptors for workers that this process has not started: handed over by a local socket.

The socket has no name in any folder. Whoever connects is known by what the kernel says of it, its
user and process, and is given what was made for that process alone, once.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable

from hardpoint.errors import ExecutorFailedError
from hardpoint_multiproc import descriptors

_CREDENTIALS = struct.Struct("iII")
CONNECT_SECONDS = 60.0
_PLACES = 128


class Handover:
    """The driver's side. ``wanted(pid)`` returns the descriptors for a process, or None for a
    stranger; used on one thread.
    """

    def __init__(self, wanted: Callable[[int], list[int] | None]) -> None:
        self._wanted = wanted
        self.name = f"hardpoint-{secrets.token_hex(16)}"
        self.refused = 0
        """Connections of other users or processes."""
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        self._end.bind(f"\0{self.name}")
        self._end.listen(_PLACES)

    def fileno(self) -> int:
        """Return the descriptor that is readable when somebody has come."""
        return self._end.fileno()

    def serve(self) -> int | None:
        """Hand over to the next that has come; return its process, or None for a stranger."""
        try:
            end, _ = self._end.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        with end:
            pid, uid = credentials(end)
            fds = self._wanted(pid) if uid == os.getuid() else None
            if fds is None:
                self.refused += 1
                return None
            try:
                descriptors.send(end, {"op": "given"}, fds)
            except OSError:  # it has ended: that is told by who watches it
                return None
            return pid

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._end.close()


def take(name: str) -> list[int]:
    """Return the descriptors that the driver has for this process. Called in a worker.

    Raises ExecutorFailedError where there are none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(CONNECT_SECONDS)
        end.connect(f"\0{name}")
        if credentials(end)[1] != os.getuid():
            raise ExecutorFailedError("the driver's socket is another user's")
        got = descriptors.receive(end)
    if got is None or not got[1]:
        raise ExecutorFailedError("the driver has nothing for this process")
    return got[1]


def credentials(end: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other side, as the kernel knows them."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
