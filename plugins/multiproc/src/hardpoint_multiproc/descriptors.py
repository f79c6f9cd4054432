"""Messages of JSON with descriptors beside them, by a pair of sockets; memory without a name."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LONGEST_MESSAGE = 1 << 16
MOST_DESCRIPTORS = 250
"""The kernel carries no more in one message (SCM_MAX_FD is 253)."""


def send(end: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message, whole. Raises OSError if the other side is gone."""
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([data], rights)


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and the descriptors that came with it (now this process's own, not
    inheritable); None at the end. Raises BlockingIOError where there is none yet.

    Where this process may not have so many, the message comes without any, and says ``refused``.
    """
    room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = end.recvmsg(LONGEST_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    fds = array.array("i")
    for level, kind, part in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    if not data:
        close(fds)
        return None
    message = json.loads(data)
    if flags & socket.MSG_CTRUNC:
        close(fds)
        return {**message, "refused": os.strerror(errno.EMFILE)}, []
    return message, list(fds)


def close(fds: Iterable[int]) -> None:
    """Close descriptors that may be closed already."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


def memory(name: str, data: bytes = b"") -> int:
    """Return a descriptor of anonymous memory that holds ``data``; ``name`` is for people only."""
    fd = os.memfd_create(f"hardpoint-{name}", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def contents(fd: int) -> bytes:
    """Return all that the memory behind ``fd`` holds, whatever its position."""
    size = os.fstat(fd).st_size
    parts, got = [], 0
    while got < size and (part := os.pread(fd, size - got, got)):
        parts.append(part)
        got += len(part)
    return b"".join(parts)


def has_memory(pid: int) -> bool:
    """Return whether a process is not about to end: that gives its memory back before its files."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
