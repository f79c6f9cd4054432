"""Who may come in: the sockets that listen for other hosts, and the keys that they know.

CURVE encrypts, and by itself lets anybody in who has *some* key: libzmq asks a handler (ZAP)
whether it knows that key, and accepts all where none runs. So every socket here has a domain and
demands a handler (ZAP_ENFORCE_DOMAIN): without one, nobody comes in. Not a byte of a peer that was
not let in is handed out.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import zmq
import zmq.utils.monitor
from zmq.utils import z85

from hardpoint.rpc.network.addresses import explicit, url
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.keys import KeyPair
from hardpoint.rpc.network.port import Port
from hardpoint.rpc.zeromq.address import LINGER_MS
from hardpoint.rpc.zeromq.wakers import Waker

USER = "User-Id"
"""The property of a message by which it is known whose key its connection proved."""

_HANDLER = "inproc://zeromq.zap.01"
_LOOK_S = 0.1
_BEGUN = zmq.EVENT_ACCEPTED
_ENDED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Door:
    """One listening ROUTER socket, open to the keys of its domain. All use of ``socket`` is under
    ``lock``. It is what :class:`hardpoint.rpc.zeromq.address.Listening` asks for.
    """

    kind = "network"
    fd = -1

    def __init__(self, gate: Gate, domain: str, host: str, port: int) -> None:
        self.domain = domain
        self.lock = threading.Lock()
        self.largest = gate.bounds.largest
        self._gate = gate
        self._half_open: dict[int, float] = {}
        self._shut = False
        self.strangers = 0
        """Handshakes that failed: by who has other keys, or none."""
        self.paused = 0
        """How often it was closed for a moment, since too many strangers were at it."""
        self.socket: zmq.Socket[bytes] = gate.socket(zmq.ROUTER)
        try:
            self._prepare(gate)
            self.port = Port(host, port, gate.bounds.backlog)
            self.address = url(host, self.port.number)
            self.monitor = self.socket.get_monitor_socket(_BEGUN | _ENDED | _FAILED)
            self.socket.setsockopt(zmq.USE_FD, self.port.give())
            self.socket.bind(self.address)
        except BaseException:
            self.socket.close(0)
            raise

    def _prepare(self, gate: Gate) -> None:
        bounds, option = gate.bounds, self.socket.setsockopt
        option(zmq.ROUTER_MANDATORY, 1)
        option(zmq.CURVE_SERVER, 1)
        option(zmq.CURVE_SECRETKEY, gate.keys.secret.encode())
        option(zmq.ZAP_DOMAIN, self.domain.encode())
        option(zmq.ZAP_ENFORCE_DOMAIN, 1)
        option(zmq.IPV6, 1)
        option(zmq.MAXMSGSIZE, bounds.largest)
        option(zmq.HANDSHAKE_IVL, int(bounds.handshake * 1000))
        option(zmq.SNDHWM, 0)  # bounded by whoever sends, in bytes
        option(zmq.LINGER, LINGER_MS)
        keep_alive(self.socket, bounds)

    def admit(self, public: str, user: str) -> None:
        """Let in who proves the key ``public``; what comes from there is known as ``user``'s."""
        self._gate.admit(self.domain, public, user)

    def user_of(self, frame: zmq.Frame) -> str:
        """Return whose key the connection proved by which a frame came."""
        with suppress(zmq.ZMQError):
            return str(frame.get(USER))
        return ""

    def admits(self, name: zmq.Frame, rank: int) -> bool:
        """Whether it came by a connection that proved that rank's key."""
        return self.user_of(name) == str(rank)

    def data(self, rank: int) -> dict[str, Any]:
        """Return how a peer whose key was made for this run comes in."""
        keys = self._gate.keys_of(self, str(rank))
        return {
            "address": self.address,
            "server_key": self._gate.keys.public,
            "public": keys.public,
            "secret": keys.secret,
            "largest": self.largest,
            "peer_timeout": self._gate.bounds.peer_timeout,
        }

    def hide(self) -> None:
        """Listen no more: all who are to come are here. Idempotent."""
        with self.lock:
            if not self._shut:
                self._shut = True
                self.port.shut()

    def watch(self) -> None:
        """Take in what became of connections; close the port while too many are half open."""
        with self.lock:
            if self.socket.closed:
                return
            while self.monitor.poll(0):
                self._note(zmq.utils.monitor.recv_monitor_message(self.monitor))
            until = time.monotonic() - self._gate.bounds.handshake - 1.0
            for fd in [each for each, since in self._half_open.items() if since < until]:
                del self._half_open[fd]
            crowded = len(self._half_open) >= self._gate.bounds.half_open
            if crowded:
                self._send_away(time.monotonic() - self._gate.bounds.crowded)
            if crowded and self.port.is_open:
                self.paused += 1
                self.port.shut()
            elif not crowded and not self._shut:
                self.port.open()

    def _send_away(self, before: float) -> None:
        """End strangers' connections that began before that moment, so that others get in."""
        for fd in [each for each, since in self._half_open.items() if since < before]:
            del self._half_open[fd]
            self.port.hang_up(fd)

    def _note(self, event: Any) -> None:
        """Keep count of the connections that have neither proved a key nor ended."""
        fd = int(event["value"])
        if event["event"] & _FAILED:
            self.strangers += 1
        elif event["event"] == _BEGUN:
            self._half_open[fd] = time.monotonic()
        elif event["event"] & (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED):
            self._half_open.pop(fd, None)
        elif self._half_open:  # a handshake that succeeded tells no descriptor: the oldest's, say
            self._half_open.pop(next(iter(self._half_open)))

    def close(self) -> None:
        """Close the socket; connections end after what was sent last had a moment. Idempotent."""
        self._gate.forget(self)
        with self.lock:
            self._shut = True
            if not self.socket.closed:
                self.socket.disable_monitor()
                self.monitor.close(0)
                self.socket.close()
                self.port.close()


class Gate:
    """The doors of one driver, and the thread that says who may pass them."""

    def __init__(self, bounds: Bounds | None = None, keys: KeyPair | None = None) -> None:
        self.bounds = Bounds() if bounds is None else bounds
        self.keys = KeyPair.make() if keys is None else keys
        self.refused = 0
        """Keys that were shown and are unknown."""
        self._known: dict[str, dict[str, str]] = {}
        self._made: dict[tuple[str, str], KeyPair] = {}
        self._doors: list[Door] = []
        self._watched: list[Door] = []
        self._changed = threading.Condition()
        self._context = zmq.Context()
        self._waker = Waker()
        self._closed = threading.Event()
        self._handler: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._handler.setsockopt(zmq.LINGER, 0)
        self._handler.bind(_HANDLER)
        self._thread = threading.Thread(target=self._run, name="hardpoint-gate", daemon=True)
        self._thread.start()

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """Return a socket of this gate's context: handlers answer for those alone."""
        made: zmq.Socket[bytes] = self._context.socket(kind)
        return made

    def open(self, domain: str, host: str, port: int = 0) -> Door:
        """Listen at an explicit address of this host; port 0: any that is free. Raises
        ConfigError.
        """
        door = Door(self, domain, explicit(host), port)
        with self._changed:
            self._doors.append(door)
        self._waker.wake()
        return door

    def admit(self, domain: str, public: str, user: str) -> None:
        """Let in who proves that key at the door of ``domain``."""
        self._known.setdefault(domain, {})[public] = user

    def keys_of(self, door: Door, user: str) -> KeyPair:
        """Return the keys by which ``user`` passes ``door``, made when first asked for."""
        if (door.domain, user) not in self._made:
            self._made[door.domain, user] = keys = KeyPair.make()
            self.admit(door.domain, keys.public, user)
        return self._made[door.domain, user]

    def forget(self, door: Door) -> None:
        """Watch a door no more: it closes. Returns when the thread has let go of it."""
        with self._changed:
            if door in self._doors:
                self._doors.remove(door)
            self._waker.wake()
            while door in self._watched and self._thread.is_alive():
                self._changed.wait(_LOOK_S)

    def stop_handler(self) -> None:
        """Answer nobody any more: then nobody else comes in. Idempotent."""
        self._closed.set()
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        """Close every door and end the thread. Idempotent."""
        for door in list(self._doors):
            door.close()
        self.stop_handler()
        self._waker.close()
        self._context.term()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._watched = list(self._doors)
                self._changed.notify_all()
            poller = zmq.Poller()
            poller.register(self._handler, zmq.POLLIN)
            poller.register(self._waker.fd, zmq.POLLIN)
            for door in self._watched:
                poller.register(door.monitor, zmq.POLLIN)
            poller.poll(int(_LOOK_S * 1000) if self._watched else None)
            self._waker.clear()
            while self._handler.poll(0):
                self._handler.send_multipart(self._answer(self._handler.recv_multipart()))
            for door in self._watched:
                door.watch()
        with self._changed:
            self._watched = []
            self._changed.notify_all()
        self._handler.close()

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        """Return whether a connection may go on, and as whose."""
        version, number, *rest = [*asked, b"", b""][: max(2, len(asked))]
        user = None
        if version == b"1.0" and len(rest) == 5 and rest[3] == b"CURVE":
            with suppress(ValueError, TypeError):
                public = z85.encode(rest[4]).decode()
                user = self._known.get(rest[0].decode(errors="replace"), {}).get(public)
        if user is None:
            self.refused += 1
            return [b"1.0", number, b"400", b"unknown key", b"", b""]
        return [b"1.0", number, b"200", b"", user.encode(), b""]


def keep_alive(socket: zmq.Socket[bytes], bounds: Bounds) -> None:
    """Have libzmq itself end a connection whose other side is gone, or stopped."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(50, int(bounds.peer_timeout * 250)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(bounds.peer_timeout * 1000))
