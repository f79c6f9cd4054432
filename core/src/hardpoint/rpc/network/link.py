"""A worker's side of a connection: made once, and its end is noticed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import ceil
from typing import Any

import zmq
import zmq.utils.monitor

from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.gate import keep_alive
from hardpoint.rpc.network.keys import KeyPair, encrypt, require_curve

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED  # nobody listens there: as it never tries again, it tells of no retry
    | REFUSED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Link:
    """Connects ``socket`` by the keys in ``data`` and watches the connection. It is never made
    again: what was on its way when it broke is lost, so who uses it must end.
    """

    def __init__(self, socket: zmq.Socket[bytes], data: Mapping[str, Any]) -> None:
        require_curve()
        self._socket = socket
        self.lost = 0
        """The event by which the connection ended; 0: it has not."""
        encrypt(socket, KeyPair(data["public"], data["secret"]), data["server_key"])
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        keep_alive(socket, Bounds(peer_timeout=data["peer_timeout"]))
        self.monitor = socket.get_monitor_socket(_LOST)
        source = data.get("source")
        address = str(data["address"])
        if source:
            address = f"tcp://{source}:0;{address.removeprefix('tcp://')}"
        socket.connect(address)

    def comes(self, seconds: float | None) -> bool:
        """Wait for a message; return at once, with whether there is one, when the link is lost."""
        until = None if seconds is None else time.monotonic() + seconds
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        while not self.lost:
            left = None if until is None else max(0.0, until - time.monotonic())
            found = dict(poller.poll(None if left is None else ceil(left * 1000)))
            if self._socket in found:
                return True
            if self.monitor in found:
                self.look()
            elif left == 0.0:
                return False
        return bool(self._socket.poll(0))

    def look(self) -> None:
        """Take in what became of the connection."""
        while self.monitor.poll(0):
            self.lost |= int(zmq.utils.monitor.recv_monitor_message(self.monitor)["event"])

    def close(self) -> None:
        """Watch no more; the socket is its owner's to close. Idempotent."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close(0)
