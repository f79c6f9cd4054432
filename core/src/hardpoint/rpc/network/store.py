"""The store by which the workers of one group find each other: names and bytes, at the driver.

Collective libraries bring stores of their own that listen for anybody; this one is behind the same
keys as all else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from hardpoint.errors import HardpointError
from hardpoint.rpc.network.link import Link

SET, GET, ADD, DELETE = b"set", b"get", b"add", b"delete"
_THERE, _MISSING, _REFUSED = b"+", b"-", b"!"

MOST_KEYS = 1 << 16
LONGEST_KEY = 1 << 10
LONGEST_VALUE = 1 << 20
LOOK_S = 0.02


class StoreLostError(HardpointError):
    """The driver's store cannot be reached, or has no room.

    What to do: nothing by itself: it follows from the end of the driver or of another worker.
    """


class Store:
    """The driver's side. Not thread-safe."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

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
            return [_THERE if values.pop(key, None) is not None else _MISSING, b""]
        if kind not in (SET, ADD) or (key not in values and len(values) >= MOST_KEYS):
            return [_REFUSED, b""]
        if kind == ADD:
            try:
                value = b"%d" % (int(values.get(key, b"0")[:20]) + int(value[:20]))
            except ValueError:
                return [_REFUSED, b""]
        values[key] = value
        return [_THERE, value]


class StoreClient:
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

    def close(self) -> None:
        """Leave. Idempotent."""
        with self._lock:
            if not self._socket.closed:
                self._link.close()
                self._socket.close()
                self._context.term()

    def _ask(self, kind: bytes, key: bytes, value: bytes) -> tuple[bytes, bytes]:
        with self._lock:
            if self._socket.closed:
                raise StoreLostError("the store was closed")
            self._socket.send_multipart([kind, key, value])
            if not self._link.comes(self._patience):
                raise StoreLostError(
                    f"the driver's store did not answer within {self._patience:g} s"
                )
            answer = self._socket.recv_multipart()
        if len(answer) != 2 or answer[0] == _REFUSED:
            raise StoreLostError(f"the driver's store refused {key[:80]!r}")
        return answer[0], answer[1]
