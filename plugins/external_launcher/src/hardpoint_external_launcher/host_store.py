"""The store of ranks that are all on one host: no network leads to it.

Rank 0 serves it at a Unix socket that has no file, only a name (unix(7), "Abstract sockets"), which
ends with its process. The system tells both sides whose process the other is: of other users' no
byte is read.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
from contextlib import suppress

from attrs import define, field
from hardpoint.rpc.network.store import LONGEST_KEY, LONGEST_VALUE, Asking, Store, StoreLostError
from hardpoint.rpc.zeromq.wakers import Waker

BACKLOG = 128
MOST_CONNECTIONS = 4096
READ = 1 << 16
ANSWER_SECONDS = 30.0
"""For how long who asks waits for an answer."""
_CREDENTIALS = struct.Struct("3i")
_COUNT, _LENGTH = struct.Struct("<B"), struct.Struct("<I")
_PARTS = 3
_LONGEST = LONGEST_KEY + LONGEST_VALUE + 64


class ForeignError(Exception):
    """What listens by that name is another user's: (process, user)."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the system knows them."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(told)
    return pid, user


def packed(parts: list[bytes]) -> bytes:
    """Return parts as they travel: how many, and each behind its length."""
    return _COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpacked(data: bytes | bytearray) -> tuple[list[bytes], int] | None:
    """Return the parts that ``data`` begins with, and how many bytes they take; None while some are
    missing. Raises ValueError for what cannot become any.
    """
    if not data:
        return None
    place, parts = _COUNT.size, []
    if data[0] > _PARTS:
        raise ValueError(f"{data[0]} parts")
    for _ in range(data[0]):
        if len(data) < place + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        if place + length > _LONGEST:
            raise ValueError(f"a part of {length} bytes")
        if len(data) < place + length:
            return None
        parts.append(bytes(data[place : place + length]))
        place += length
    return parts, place


@define(eq=False)
class _Visitor:
    """One connection: what it said that is no whole request yet, and what it has not taken."""

    connection: socket.socket
    heard: bytearray = field(factory=bytearray)
    untold: bytearray = field(factory=bytearray)


class HostStore:
    """Serves the store by ``name``, to processes of ``user``, on a thread. Raises OSError."""

    def __init__(self, name: str, user: int | None = None) -> None:
        self._user = os.geteuid() if user is None else user
        self._store = Store()
        self._visitors: set[int] = set()
        self.turned_away = 0
        """Connections of other users."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_abstract(name))
            self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._waker = Waker()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hardpoint-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more. Idempotent."""
        self._ended.set()
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker.fd, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, events in selector.select():
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.data, _Visitor):
                        self._serve(selector, key.data, events)
                    else:
                        self._waker.clear()
            self._listener.close()
            for key in list(selector.get_map().values()):
                if isinstance(key.data, _Visitor):
                    key.data.connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left for it
            return
        if peer_of(connection)[1] != self._user or len(self._visitors) >= MOST_CONNECTIONS:
            self.turned_away += 1
            connection.close()
            return
        connection.setblocking(False)
        self._visitors.add(connection.fileno())
        selector.register(connection, selectors.EVENT_READ, _Visitor(connection))

    def _serve(self, selector: selectors.BaseSelector, visitor: _Visitor, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = visitor.connection.recv(READ)
                if not data:
                    raise ConnectionResetError
                visitor.heard += data
                while len(visitor.untold) <= _LONGEST and (found := unpacked(visitor.heard)):
                    parts, size = found
                    del visitor.heard[:size]
                    visitor.untold += packed(self._store.answer(parts))
            if visitor.untold:
                with suppress(BlockingIOError):
                    del visitor.untold[: visitor.connection.send(visitor.untold)]
        except (OSError, ValueError):
            self._visitors.discard(visitor.connection.fileno())
            selector.unregister(visitor.connection)
            visitor.connection.close()
            return
        wanted = selectors.EVENT_WRITE if visitor.untold else selectors.EVENT_READ
        selector.modify(visitor.connection, wanted, visitor)


class HostStoreClient(Asking):
    """Asks the store by ``name``. Raises StoreLostError while nobody serves it, ForeignError if a
    process of another user does.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.settimeout(ANSWER_SECONDS)
            self._connection.connect(_abstract(name))
            pid, user = peer_of(self._connection)
        except OSError as error:
            self._connection.close()
            raise StoreLostError(f"nobody serves the store of all ranks: {error}") from error
        if user != os.geteuid():
            self._connection.close()
            raise ForeignError(pid, user)

    def exchange(self, request: list[bytes]) -> list[bytes]:
        """Ask, and wait for the answer."""
        with self._lock:
            try:
                self._connection.sendall(packed(request))
                heard = bytearray()
                while (found := unpacked(heard)) is None:
                    data = self._connection.recv(READ)
                    if not data:
                        raise ConnectionResetError("it was closed")
                    heard += data
            except (OSError, ValueError) as error:
                raise StoreLostError(f"the store of all ranks is lost: {error}") from error
            return found[0]

    def close(self) -> None:
        """Leave. Idempotent."""
        self._connection.close()


def _abstract(name: str) -> str:
    return f"\0{name}"
