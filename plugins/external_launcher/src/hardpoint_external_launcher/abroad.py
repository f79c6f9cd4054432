"""Lines to ranks on other hosts: one thread carries what their pipes hold through encrypted
connections, of which each pair of ranks has one.

To the rest a line abroad is a line: :class:`hardpoint_external_launcher.lines.Line` reads from one
pipe and writes to another, and here are their other ends. The rank with the greater number
connects. No side sends more than WINDOW bytes that the other has not taken.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import zmq
from attrs import define, field
from hardpoint.rpc.network.addresses import explicit, of_this_host, towards
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.gate import Gate
from hardpoint.rpc.network.link import Link
from hardpoint.rpc.network.store import Store
from hardpoint.rpc.zeromq.wakers import Waker

from hardpoint_external_launcher.lines import READ, Line
from hardpoint_external_launcher.settings import ADDRESS

WINDOW = 1 << 22
"""Bytes on their way that the other side has not taken."""
LARGEST = 1 << 21
"""Bytes of one message, be it a part of a line or of the store."""
RANKS = "ranks"

HELLO, DATA, TAKEN, END = b"h", b"d", b"t", b"e"
_LOOK_MS = 200
_AGAIN_S = 0.1
_FAREWELL_S = 1.0


@define(eq=False)
class _Way:
    """One rank on another host: the ends of its two pipes, and its connection."""

    rank: int
    reader: int
    writer: int
    door: Mapping[str, Any] | None = None
    """How it is reached; None for one that connects itself."""
    name: bytes = b""
    socket: zmq.Socket[bytes] | None = None
    link: Link | None = None
    again: float = 0.0
    here: bool = False
    ended: bool = False
    unsent: bytes = b""
    sent: int = 0
    """Bytes that it has not said to have taken."""
    untaken: bytearray = field(factory=bytearray)


class Abroad:
    """The door of this rank, and the ways to the ranks of other hosts."""

    def __init__(self, place: tuple[str, int], address: str | None, peer_timeout: float) -> None:
        """``place`` is where the ranks meet; ``address`` is this host's (None: the one from which
        packets to ``place`` leave). Raises ConfigError for one that is none.
        """
        bounds = Bounds(peer_timeout=peer_timeout, largest=LARGEST)
        self.address = (
            explicit(towards(explicit(place[0]), place[1]))
            if address is None
            else of_this_host(address, ADDRESS)
        )
        self._peer_timeout = peer_timeout
        self._ways: dict[int, _Way] = {}
        self._store: Store | None = None
        self._users: set[str] = set()
        self._ranks = 1
        self._waker = Waker()
        self._ending = threading.Event()
        self._farewell = 0.0
        self._context = zmq.Context()
        self._gate = Gate(bounds)
        try:
            self._door = self._gate.open(RANKS, self.address)
        except BaseException:
            self._gate.close()
            self._waker.close()
            self._context.term()
            raise
        self._thread = threading.Thread(target=self._run, name="hardpoint-abroad", daemon=True)

    @property
    def door(self) -> dict[str, str]:
        """Where this rank is reached, and the key that it proves; neither is secret."""
        return {"address": self._door.address, "key": self._gate.keys.public}

    def begin(
        self, own: int, doors: Mapping[int, Mapping[str, str]], lines: Mapping[int, Line]
    ) -> None:
        """Let all ranks in that have ``doors``, and carry ``lines``, those to other hosts."""
        self._ranks = len(doors)
        for rank, door in doors.items():
            self._door.admit(door["key"], str(rank))
        if own == 0:
            self._store = Store()
        for rank, line in lines.items():
            reader, writer = line.carried()
            way = _Way(rank, reader, writer, self.towards(doors[rank]) if rank < own else None)
            self._ways[rank] = way
        self._thread.start()

    def towards(self, door: Mapping[str, str]) -> dict[str, Any]:
        """Return how another rank's door, and the store behind rank 0's, are reached by this rank;
        it holds this one's secret.
        """
        keys = self._gate.keys
        return {
            "address": door["address"],
            "server_key": door["key"],
            "public": keys.public,
            "secret": keys.secret,
            "peer_timeout": self._peer_timeout,
            "name": secrets.token_hex(16),
            "source": self.address,
        }

    def close(self) -> None:
        """Carry what the lines, which are closed by now, still hold, and end. Idempotent."""
        self._farewell = time.monotonic() + _FAREWELL_S
        self._ending.set()
        if not self._context.closed:
            self._waker.wake()
            if self._thread.ident is not None:
                self._thread.join()
            self._gate.close()
            self._waker.close()
            self._context.term()

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._done():
                self._turn()
        finally:
            for way in self._ways.values():
                self._end(way)

    def _done(self) -> bool:
        if not self._ending.is_set():
            return False
        carried = all(way.ended or way.reader < 0 for way in self._ways.values())
        return carried or time.monotonic() > self._farewell

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        poller.register(self._door.socket, zmq.POLLIN)
        for way in self._ways.values():
            self._connect(way)
            if way.socket is not None and way.link is not None:
                poller.register(way.socket, zmq.POLLIN)
                poller.register(way.link.monitor, zmq.POLLIN)
            if self._may_read(way):
                poller.register(way.reader, zmq.POLLIN)
            if way.untaken and way.writer >= 0:
                poller.register(way.writer, zmq.POLLOUT)
        wait = 20 if self._ending.is_set() or self._connecting() else _LOOK_MS
        poller.poll(wait)
        self._waker.clear()
        self._hear_door()
        for way in self._ways.values():
            self._hear(way)
            self._pass_on(way)
            self._send_unsent(way)
            while self._may_read(way) and self._read(way):
                self._send_unsent(way)
        wanted = self._ranks if self._store is not None else 0
        if len(self._users) >= wanted and not any(
            way.door is None and not way.here for way in self._ways.values()
        ):
            self._door.hide()  # all are here who are to come

    def _connecting(self) -> bool:
        return any(way.door is not None and not way.here for way in self._ways.values())

    def _connect(self, way: _Way) -> None:
        """Knock, again and again, until the other side, which may not know this one yet, answers;
        who gives up is the one who waits for all to have come.
        """
        if way.door is None or way.ended or way.socket or time.monotonic() < way.again:
            return
        way.socket = self._context.socket(zmq.DEALER)
        way.socket.setsockopt(zmq.ROUTING_ID, b"r" + secrets.token_bytes(16))
        way.socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        way.socket.setsockopt(zmq.LINGER, int(_FAREWELL_S * 500))
        way.link = Link(way.socket, way.door)
        way.socket.send(HELLO)

    def _hear_door(self) -> None:
        door = self._door
        while door.socket.poll(0):
            name, *frames = door.socket.recv_multipart(copy=False)
            user = door.user_of(name)
            way = self._ways.get(int(user)) if user.isdecimal() else None
            parts = [frame.bytes for frame in frames]
            if len(parts) == 3:
                if self._store is not None and user:
                    self._users.add(user)
                    with suppress(zmq.ZMQError):
                        answer = self._store.answer(parts)
                        door.socket.send_multipart([name.bytes, *answer], zmq.NOBLOCK)
            elif way is not None and way.door is None and not way.ended:
                if parts == [HELLO] and not way.name:
                    way.name, way.here = name.bytes, True
                    self._put(way, HELLO)
                elif name.bytes == way.name:
                    self._take(way, parts)

    def _hear(self, way: _Way) -> None:
        if way.socket is None or way.link is None:
            return
        while way.socket is not None and way.socket.poll(0):
            self._take(way, way.socket.recv_multipart())
        if way.link is None:  # it was lost by what it said
            return
        way.link.look()
        if way.link.lost and way.here:
            self._lose(way)
        elif way.link.lost:  # it does not listen yet, or does not know this one's key yet
            way.again = time.monotonic() + _AGAIN_S
            self._disconnect(way)

    def _take(self, way: _Way, parts: list[bytes]) -> None:
        kind, data = parts[0], parts[1] if len(parts) == 2 else b""
        if kind == HELLO:
            way.here = True
        elif kind == DATA:
            way.untaken += data
            if len(way.untaken) > WINDOW:  # it does not keep to what is agreed
                self._put(way, END)
                self._lose(way)
        elif kind == TAKEN and len(data) == 8:
            way.sent = max(0, way.sent - int.from_bytes(data, "little"))
        elif kind == END:
            self._lose(way)

    def _pass_on(self, way: _Way) -> None:
        """Give what came to the line, as far as that takes it."""
        taken = 0
        while way.untaken and way.writer >= 0:
            try:
                count = os.write(way.writer, memoryview(way.untaken)[:READ])
            except BlockingIOError:
                break
            except OSError:  # the line is closed
                way.untaken.clear()
                break
            del way.untaken[:count]
            taken += count
        if taken:
            self._put(way, TAKEN, taken.to_bytes(8, "little"))
        if way.ended and not way.untaken:
            way.writer = _closed(way.writer)

    def _may_read(self, way: _Way) -> bool:
        return way.here and way.reader >= 0 and not way.unsent and way.sent + READ <= WINDOW

    def _read(self, way: _Way) -> bool:
        """Take a piece of what the line wants sent; return whether there was one."""
        try:
            way.unsent = os.read(way.reader, READ)
        except BlockingIOError:
            return False
        except OSError:
            way.unsent = b""
        if not way.unsent:
            way.reader = _closed(way.reader)
            self._put(way, END)
        return bool(way.unsent)

    def _send_unsent(self, way: _Way) -> None:
        if way.unsent and not way.ended and self._put(way, DATA, way.unsent):
            way.sent += len(way.unsent)
            way.unsent = b""

    def _put(self, way: _Way, *parts: bytes) -> bool:
        """Send to a rank; False where there is no room now, or it is gone."""
        try:
            if way.socket is not None:
                way.socket.send_multipart(parts, zmq.NOBLOCK)
            elif way.name:
                self._door.socket.send_multipart([way.name, *parts], zmq.NOBLOCK)
            else:
                return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._lose(way)
            return False
        return True

    def _lose(self, way: _Way) -> None:
        """It is gone: the line ends, after what came is taken."""
        way.ended, way.unsent = True, b""
        way.reader = _closed(way.reader)
        self._disconnect(way)

    def _disconnect(self, way: _Way) -> None:
        if way.link is not None:
            way.link.close()
        if way.socket is not None:
            way.socket.close()
        way.link = way.socket = None

    def _end(self, way: _Way) -> None:
        self._disconnect(way)
        way.reader, way.writer = _closed(way.reader), _closed(way.writer)


def _closed(descriptor: int) -> int:
    if descriptor >= 0:
        os.close(descriptor)
    return -1
