"""Where the driver's socket listens: under a name for a moment only, where the system allows it."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Protocol

import zmq

from hardpoint.rpc.zeromq.frames import LARGEST

LINGER_MS = 200


class Listening(Protocol):
    """A ROUTER socket that workers can connect to, and how they do. ``fd`` is the descriptor that
    they inherit for that, or -1; ``largest`` is the bytes of a message that is accepted.
    """

    kind: str
    socket: zmq.Socket[bytes]
    fd: int
    largest: int

    def data(self, rank: int) -> dict[str, Any]:
        """Return what worker ``rank`` needs besides the descriptor."""

    def admits(self, name: zmq.Frame, rank: int) -> bool:
        """Whether what came under the name of ``rank`` came from there."""

    def hide(self) -> None:
        """Let nobody else connect: all are here. Idempotent."""

    def close(self) -> None:
        """Give everything back, after what was sent last had a moment. Idempotent."""


class Address:
    """A Unix socket of this process, and how workers reach it.

    On Linux its name is removed at once; workers connect by a descriptor of the file, which they
    inherit. Elsewhere it keeps a name in a folder of this user alone until :meth:`hide`.
    """

    kind = "zmq"
    largest = LARGEST

    def __init__(self) -> None:
        self.fd = -1
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the driver's end
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._folder = Path(tempfile.mkdtemp(prefix="hardpoint-"))  # mode 0700
        self._path = self._folder / "calls"
        try:
            if hasattr(os, "O_PATH"):
                self._listen_unnamed(self.socket)
            else:
                self.socket.bind(f"ipc://{self._path}")
        except BaseException:
            self.close()
            raise

    def data(self, rank: int) -> dict[str, Any]:
        """Return what a worker needs besides the descriptor, if there is one."""
        return {} if self.fd >= 0 else {"path": str(self._path)}

    def admits(self, name: zmq.Frame, rank: int) -> bool:
        """Return True: a name is known to its owner alone."""
        return True

    def hide(self) -> None:
        """Remove the name: who is to connect has done so. Idempotent."""
        self._path.unlink(missing_ok=True)
        if self._folder.exists():
            self._folder.rmdir()

    def close(self) -> None:
        """Give socket, descriptor and name back. Idempotent."""
        self.socket.close()
        self.hide()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._context.term()

    def _listen_unnamed(self, router: zmq.Socket[bytes]) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
            listener.listen(128)
            self.fd = os.open(self._path, os.O_PATH | os.O_CLOEXEC)
            self.hide()
            router.setsockopt(zmq.USE_FD, listener.fileno())
            router.bind(f"ipc://{self._path}")
        except BaseException:
            listener.close()
            raise
        listener.detach()  # it is the router's now


def connected(socket: zmq.Socket[bytes], fds: tuple[int, ...], path: str | None) -> None:
    """Connect a worker's socket: by the inherited descriptor, or by the name."""
    socket.connect(f"ipc:///proc/self/fd/{fds[0]}" if fds else f"ipc://{path}")
