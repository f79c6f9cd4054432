"""The store by which the workers of one group find each other: names and bytes, at the driver.

Collective libraries bring stores of their own that listen for anybody; this one is behind the same
keys as all else.
"""

from __future__ import annotations

import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from hardpoint.errors import HardpointError
from hardpoint.rpc.network.link import Link

SET, GET, ADD, DELETE, REPLACE = b"set", b"get", b"add", b"delete", b"replace"
_THERE, _MISSING, _REFUSED = b"+", b"-", b"!"

MOST_KEYS = 1 << 16
LONGEST_KEY = 1 << 10
LONGEST_VALUE = 1 << 20
MOST_BYTES = 1 << 26
"""Of all keys and values together."""
LOOK_S = 0.02
_LENGTH = struct.Struct("<I")


class StoreLostError(HardpointError):
    """The driver's store cannot be reached, or has no room.

    What to do: nothing by itself: it follows from the end of the driver or of another worker.
    """


class Store:
    """The driver's side. Not thread-safe."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0

    def answer(self, asked: Sequence[bytes]) -> list[bytes]:
        """Return the answer to one request: what it was is the first frame."""
        if len(asked) != 3 or len(asked[1]) > LONGEST_KEY or len(asked[2]) > LONGEST_VALUE:
            return [_REFUSED, b""]
        kind, key, value = asked
        values = self._values
        if kind == GET:
            found = values.get(key)
            return [_MISSING, b""] if found is None else [_THERE, found]
        if kind == DELETE:
            gone = values.pop(key, None)
            self._bytes -= 0 if gone is None else len(key) + len(gone)
            return [_MISSING if gone is None else _THERE, b""]
        if kind == ADD:
            try:
                value = b"%d" % (int(values.get(key, b"0")[:20]) + int(value[:20]))
            except ValueError:
                return [_REFUSED, b""]
        elif kind == REPLACE:
            length = _LENGTH.unpack_from(value)[0] if len(value) >= _LENGTH.size else len(value)
            expected, value = value[_LENGTH.size :][:length], value[_LENGTH.size + length :]
            if values.get(key, b"") != expected:
                return [_THERE, values.get(key, b"")]
        elif kind != SET:
            return [_REFUSED, b""]
        return self._put(key, value)

    def _put(self, key: bytes, value: bytes) -> list[bytes]:
        old = self._values.get(key)
        more = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._bytes + more > MOST_BYTES or (old is None and len(self._values) >= MOST_KEYS):
            return [_REFUSED, b""]
        self._bytes += more
        self._values[key] = value
        return [_THERE, value]


class Asking(ABC):
    """Who asks a store: what can be asked, over any way to it."""

    def set(self, key: bytes, value: bytes) -> None:
        """Put a value."""
        self._ask(SET, key, value)

    def get(self, key: bytes) -> bytes | None:
        """Return a value, or None if it is not there (yet)."""
        there, value = self._ask(GET, key, b"")
        return value if there == _THERE else None

    def add(self, key: bytes, amount: int) -> int:
        """Add to a number, 0 before it was first added to; return it."""
        return int(self._ask(ADD, key, b"%d" % amount)[1])

    def replace(self, key: bytes, expected: bytes, value: bytes) -> bytes:
        """Put ``value`` where ``expected`` is (empty: nothing); return what is there then."""
        return self._ask(REPLACE, key, _LENGTH.pack(len(expected)) + expected + value)[1]

    def delete(self, key: bytes) -> bool:
        """Remove a value; return whether it was there."""
        return self._ask(DELETE, key, b"")[0] == _THERE

    def wait(self, keys: Sequence[bytes], timeout: float) -> bool:
        """Wait until all of ``keys`` are there; False if that took more than ``timeout`` s."""
        until = time.monotonic() + timeout
        while not all(self.get(key) is not None for key in keys):
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)
        return True

    def _ask(self, kind: bytes, key: bytes, value: bytes) -> tuple[bytes, bytes]:
        answer = self.exchange([kind, key, value])
        if len(answer) != 2 or answer[0] == _REFUSED:
            raise StoreLostError(f"the store of all ranks refused {key[:80]!r}")
        return answer[0], answer[1]

    @abstractmethod
    def exchange(self, request: list[bytes]) -> list[bytes]:
        """Return the store's answer. Raises StoreLostError."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Idempotent."""


class StoreClient(Asking):
    """A worker's side, by the data that the driver gave it. Thread-safe."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._lock = threading.Lock()
        self._patience = float(data["peer_timeout"]) * 3
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(data["name"]))
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * LONGEST_VALUE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._link = Link(self._socket, data)

    def close(self) -> None:
        """Leave. Idempotent."""
        with self._lock:
            if not self._socket.closed:
                self._link.close()
                self._socket.close()
                self._context.term()

    def exchange(self, request: list[bytes]) -> list[bytes]:
        """Ask by the one connection. Raises StoreLostError without an answer in time."""
        with self._lock:
            if self._socket.closed:
                raise StoreLostError("the store was closed")
            self._socket.send_multipart(request)
            if not self._link.comes(self._patience):
                raise StoreLostError(
                    f"the driver's store did not answer within {self._patience:g} s"
                )
            return self._socket.recv_multipart()
