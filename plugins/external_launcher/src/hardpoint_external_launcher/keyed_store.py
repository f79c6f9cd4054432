"""The store of ranks on several hosts whose launcher has none: behind the keys of their key file.

Rank 0 serves it at MASTER_ADDR and MASTER_PORT. Who has not these keys has not a byte of his read,
and costs no more than the bounds of every listener (:mod:`hardpoint.rpc.network.gate`).
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from typing import Any

import zmq
from hardpoint.rpc.network.addresses import url
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.gate import Gate
from hardpoint.rpc.network.key_file import JoinKeys
from hardpoint.rpc.network.store import LONGEST_VALUE, Store, StoreClient
from hardpoint.rpc.zeromq.wakers import Waker

MEETING, RANK = "meeting", "rank"
LARGEST = 2 * LONGEST_VALUE
_LOOK_MS = 200


class KeyedStore:
    """Serves the store at an address of this host. Raises ConfigError and OSError."""

    def __init__(self, keys: JoinKeys, host: str, port: int, peer_timeout: float) -> None:
        self._store = Store()
        self._waker = Waker()
        self._ended = threading.Event()
        self._gate = Gate(Bounds(peer_timeout=peer_timeout, largest=LARGEST), keys.leader)
        try:
            self._door = self._gate.open(MEETING, host, port)
            self._door.admit(keys.follower.public, RANK)
        except BaseException:
            self._gate.close()
            self._waker.close()
            raise
        self._thread = threading.Thread(target=self._run, name="hardpoint-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more. Idempotent."""
        self._ended.set()
        self._waker.wake()
        self._thread.join()
        self._gate.close()
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        poller.register(self._door.socket.getsockopt(zmq.FD), zmq.POLLIN)
        while not self._ended.is_set():
            poller.poll(_LOOK_MS)
            self._waker.clear()
            while self._answer():
                pass

    def _answer(self) -> bool:
        """Answer one request, if there is one."""
        with self._door.lock:
            if not int(self._door.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            name, *frames = self._door.socket.recv_multipart(copy=False)
            if self._door.user_of(name) == RANK:
                answer = self._store.answer([frame.bytes for frame in frames])
                with suppress(zmq.ZMQError):  # it is gone
                    self._door.socket.send_multipart([name.bytes, *answer], zmq.NOBLOCK)
        return True


def way_to(keys: JoinKeys, host: str, port: int, peer_timeout: float) -> dict[str, Any]:
    """Return what a StoreClient is made from; it holds a secret."""
    return {
        "address": url(host, port),
        "server_key": keys.leader.public,
        "public": keys.follower.public,
        "secret": keys.follower.secret,
        "peer_timeout": peer_timeout,
        "name": secrets.token_hex(16),
    }


def client(keys: JoinKeys, host: str, port: int, peer_timeout: float) -> StoreClient:
    """Return a rank's way to the store; the first thing asked of it tells whether it is there."""
    return StoreClient(way_to(keys, host, port, peer_timeout))
