"""Where the driver's socket listens: under a name for a moment only, where the system allows it."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import zmq


class Address:
    """A Unix socket of this process, and how workers reach it.

    On Linux its name is removed at once; workers connect by a descriptor of the file, which they
    inherit. Elsewhere it keeps a name in a folder of this user alone until :meth:`hide`.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self.fd = -1
        self._folder = Path(tempfile.mkdtemp(prefix="hardpoint-"))  # mode 0700
        self._path = self._folder / "calls"
        try:
            if hasattr(os, "O_PATH"):
                self._listen_unnamed(router)
            else:
                router.bind(f"ipc://{self._path}")
        except BaseException:
            self.hide()
            raise

    def data(self) -> dict[str, Any]:
        """Return what a worker needs besides the descriptor, if there is one."""
        return {} if self.fd >= 0 else {"path": str(self._path)}

    def hide(self) -> None:
        """Remove the name: who is to connect has done so. Idempotent."""
        self._path.unlink(missing_ok=True)
        if self._folder.exists():
            self._folder.rmdir()

    def close(self) -> None:
        """Give the descriptor and the name back. Idempotent."""
        self.hide()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

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
