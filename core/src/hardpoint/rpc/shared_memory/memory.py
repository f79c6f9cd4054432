"""Memory that processes share by descriptor. It has no name, so nothing can be left behind."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading

from hardpoint.errors import UnsupportedError

PAGE = mmap.PAGESIZE
ORDERED = frozenset({"x86_64", "i386", "i586", "i686"})
"""Processors that let one process see another's stores in their order (total store order)."""


def is_ordered() -> bool:
    """Whether this machine's processes can talk by memory: a message is in place once the word that
    announces it is, and a Fence is one. Python has no other fence, so elsewhere they must not.
    """
    return os.uname().machine in ORDERED


class Memory:
    """One anonymous file, mapped whole. Pages cost nothing until they are touched.

    Its size is sealed, so no process can cut it off under another's feet.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.map = mmap.mmap(fd, size)
        self.bytes = memoryview(self.map)
        self.words = self.bytes.cast("Q")
        """The same memory as 64-bit numbers; a load or store of one is a single access."""

    @classmethod
    def create(cls, size: int) -> Memory:
        """Make new memory of ``size`` bytes, rounded up to pages, all zero."""
        size = -(-size // PAGE) * PAGE
        fd = os.memfd_create("hardpoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> Memory:
        """Map memory that another process made. Raises UnsupportedError if its size is another."""
        found = os.fstat(fd).st_size
        if found != size:
            raise UnsupportedError(
                f"shared memory of {found} bytes", "this channel", reason=f"{size} were announced"
            )
        return cls(fd, size)

    def close(self) -> None:
        """Close the descriptor and the mapping; memory of which views are held stays with them.

        Idempotent.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.words.release()
        self.bytes.release()
        with contextlib.suppress(BufferError):  # a view is kept: the mapping goes with it
            self.map.close()


class Fence:
    """A full memory barrier, made of a lock: its acquisition is a locked instruction, which on the
    ORDERED processors no load or store passes.

    One thread at a time may use an instance.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Pass it."""
        with self._lock:
            pass
