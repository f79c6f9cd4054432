"""A file shared by the ranks of one host: named regions of memory, and signs of life.

The file is the one that the launcher hands to every worker as the rendezvous, best an anonymous one
(``memfd_create``) named by descriptor, ``/proc/self/fd/N``, so that nothing is left behind whatever
dies. Its first page-aligned part is a table: region name -> place. Whoever asks for a region first
makes it; all bytes of a new region are zero.

A rank's sign of life is a lock on a byte of its own. The kernel gives it back when the process
ends, however it ends; no process identifier can be mistaken, and threads can be ranks as well,
because each opens the file itself (``F_OFD_SETLK``, Linux 3.15; elsewhere nobody looks dead).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Sequence

from hardpoint.errors import HardpointError

MAGIC = b"hardpoint arena 1\n"
TABLE = 1 << 16
"""Bytes of the table."""
LOCKS = 1 << 60
"""Where the bytes lie that are locked as signs of life: far behind any content."""
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process


class Arena:
    """One rank's view of the file. Used on one thread at a time."""

    def __init__(self, path: str) -> None:
        self._starts: dict[str, int] = {}
        try:
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise HardpointError(
                f"the rendezvous {path} cannot be opened ({error.strerror}): the executor hands "
                "its workers a file that they share"
            ) from error

    def region(self, name: str, size: int) -> mmap.mmap:
        """Return the memory of region ``name``, ``size`` bytes, the same for every rank.

        Raises HardpointError if it has another size for somebody else.
        """
        fd = self._descriptor()
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            table = self._read_table()
            if name not in table:
                page = mmap.ALLOCATIONGRANULARITY
                start = max((at + length for at, length in table.values()), default=TABLE)
                table[name] = (-(-start // page) * page, size)
                self._write_table(table)
                os.ftruncate(fd, sum(table[name]))
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
        start, length = table[name]
        self._starts[name] = start
        if length != size:
            raise HardpointError(
                f"region {name!r} of the rendezvous has {length} bytes, not {size}: the workers "
                "differ in version or configuration"
            )
        return mmap.mmap(fd, size, offset=start)

    def sign(self, name: str, member: int) -> None:
        """Give a sign of life as ``member`` of region ``name``, until :meth:`close` or the end of
        the process.
        """
        self._lock(self._place(name, member), "F_OFD_SETLK")

    def lost(self, name: str, members: Sequence[int]) -> list[int]:
        """Return those of ``members`` who gave no sign of life, or whose is gone."""
        return [
            member
            for member in members
            if self._lock(self._place(name, member), "F_OFD_GETLK") == fcntl.F_UNLCK
        ]

    def close(self) -> None:
        """Take back the signs of life and close the file; regions stay mapped. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _descriptor(self) -> int:
        if self._fd is None:
            raise HardpointError("the rendezvous was closed")
        return self._fd

    def _place(self, name: str, member: int) -> int:
        return LOCKS + self._starts[name] + member

    def _lock(self, place: int, command: str) -> int | None:
        number = getattr(fcntl, command, None)
        if number is None:
            return None
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        answer = fcntl.fcntl(self._descriptor(), number, request)
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind

    def _read_table(self) -> dict[str, tuple[int, int]]:
        head = os.pread(self._descriptor(), TABLE, 0).rstrip(b"\0")
        if not head:
            return {}
        if not head.startswith(MAGIC):
            raise HardpointError(
                "the rendezvous has other content: it serves another kind of communication"
            )
        return {name: (at, size) for name, (at, size) in json.loads(head[len(MAGIC) :]).items()}

    def _write_table(self, table: dict[str, tuple[int, int]]) -> None:
        content = MAGIC + json.dumps(table).encode()
        if len(content) > TABLE:
            raise HardpointError(f"{len(table)} groups are more than the rendezvous has room for")
        os.pwrite(self._descriptor(), content, 0)
