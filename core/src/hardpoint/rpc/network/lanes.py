"""Control lanes across hosts, and the store by which workers meet.

To both sides a lane is what :func:`hardpoint.rpc.control.lane` makes: a pair of local sockets. Here
the two ends are in two hosts, and a thread on either side carries the messages between its own
socket and the connection. The end of the connection is the end of the lane.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq
from attrs import define, evolve, field

from hardpoint.rpc import control
from hardpoint.rpc.control import Report
from hardpoint.rpc.network.gate import Door
from hardpoint.rpc.network.link import Link
from hardpoint.rpc.network.store import Store
from hardpoint.rpc.zeromq.wakers import Waker

LONGEST = 256
"""Bytes of a lane's message."""

HELLO, MESSAGE, END = b"h", b"m", b"e"
_CLOCK = struct.Struct("<d")
_LOOK_MS = 200


@define(eq=False)
class _Lane:
    """One rank's lane as the driver's thread has it: the far end of a pair of local sockets."""

    name: bytes
    near: socket.socket
    far: socket.socket
    here: bool = False
    told: float | None = None
    """The ``busy_since`` that it told last, by its own clock, and what that is by this host's."""
    busy: float | None = None
    waiting: list[bytes] = field(factory=list)


class Lanes:
    """The driver's side: a lane for each of ``remote``, and a place in the store for each of
    ``members``, all of them behind one door. Ranks are those of the whole group.
    """

    def __init__(self, door: Door, remote: Sequence[int], members: Sequence[int]) -> None:
        self._door = door
        self._lanes: dict[int, _Lane] = {}
        for rank in remote:
            near, far = control.lane()
            far.setblocking(False)
            self._lanes[rank] = _Lane(secrets.token_bytes(16), near, far)
        self._by_name = {lane.name: rank for rank, lane in self._lanes.items()}
        self._stores = {secrets.token_bytes(16): rank for rank in members}
        self._store = Store()
        self._met: set[int] = set()
        self._waker = Waker()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hardpoint-network", daemon=True)
        self._thread.start()

    def take(self, rank: int) -> socket.socket:
        """Return the driver's end of the lane of ``rank``, for a ControlLane, whose it is then."""
        return self._lanes[rank].near

    def data(self, rank: int) -> dict[str, Any]:
        """Return what the worker ``rank`` makes its end of."""
        return {"name": self._lanes[rank].name.hex(), **self._door.data(rank)}

    def store_data(self, rank: int) -> dict[str, Any]:
        """Return what the worker ``rank``, remote or not, reaches the store by."""
        name = next(name for name, owner in self._stores.items() if owner == rank)
        return {"name": name.hex(), **self._door.data(rank)}

    def close(self) -> None:
        """End all lanes; workers take that for the driver's end. Idempotent."""
        self._ended.set()
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._door.close()
        self._waker.close()
        for lane in self._lanes.values():
            lane.far.close()
            lane.near.close()

    # On the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        poller.register(self._door.socket.getsockopt(zmq.FD), zmq.POLLIN)
        fds = {lane.far.fileno(): rank for rank, lane in self._lanes.items()}
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        while not self._ended.is_set():
            ready = dict(poller.poll(_LOOK_MS))
            self._waker.clear()
            self._read()
            for fd in [each for each in ready if each in fds]:
                if not self._orders(fds[fd]):
                    poller.unregister(fd)
            if all(lane.here for lane in self._lanes.values()) and len(self._met) == len(
                self._stores
            ):
                self._door.hide()
        for lane in self._lanes.values():
            self._put(lane.name, END)

    def _read(self) -> None:
        """Take what has come by the door, until there is no more."""
        while True:
            with self._door.lock:
                if self._door.socket.closed:
                    return
                if not int(self._door.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
                name, *frames = self._door.socket.recv_multipart(copy=False)
            self._take(name, [frame.bytes for frame in frames])

    def _take(self, name: zmq.Frame, frames: list[bytes]) -> None:
        known = name.bytes
        rank = self._by_name.get(known, self._stores.get(known))
        if rank is None or not self._door.admits(name, rank):
            return
        if known in self._stores:
            self._met.add(rank)
            self._put(known, *self._store.answer(frames))
        elif frames and frames[0] == HELLO:
            self._arrived(self._lanes[rank])
        elif len(frames) == 3 and frames[0] == MESSAGE and len(frames[1]) == _CLOCK.size:
            self._report(self._lanes[rank], frames[1], frames[2])

    def _arrived(self, lane: _Lane) -> None:
        lane.here = True
        waiting, lane.waiting = lane.waiting, []
        for order in waiting:
            self._put(lane.name, MESSAGE, order)

    def _report(self, lane: _Lane, clock: bytes, data: bytes) -> None:
        report = Report.unpack(data)
        if report is None:
            return
        if report.busy_since is not None:
            if report.busy_since != lane.told:
                ahead = time.monotonic() - _CLOCK.unpack(clock)[0]
                lane.told, lane.busy = report.busy_since, report.busy_since + ahead
            report = evolve(report, busy_since=lane.busy)
        with suppress(OSError):  # the driver reads too slowly, or closed the lane
            lane.far.send(report.pack())

    def _orders(self, rank: int) -> bool:
        """Pass the driver's orders on; False at the end of its side."""
        lane = self._lanes[rank]
        while True:
            try:
                order = lane.far.recv(LONGEST)
            except BlockingIOError:
                return True
            except OSError:
                order = b""
            if not order:
                self._put(lane.name, END)
                return False
            if lane.here:
                self._put(lane.name, MESSAGE, order)
            else:
                lane.waiting = [*lane.waiting[-7:], order]

    def _put(self, name: bytes, *frames: bytes) -> None:
        with self._door.lock, suppress(zmq.ZMQError):  # it is gone, or reads too slowly
            if not self._door.socket.closed:
                self._door.socket.send_multipart([name, *frames], zmq.NOBLOCK)


class WorkerLane:
    """A worker's side: :attr:`end` is its end of the lane, for a ControlThread.

    The thread ends when the connection or the lane does; ``lost()`` is then called.
    """

    def __init__(self, data: Mapping[str, Any], lost: Callable[[], None] | None = None) -> None:
        self.end, self._far = control.lane()
        self._far.setblocking(False)
        self._lost = lost
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(data["name"]))
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._link = Link(self._socket, data)
        self._socket.send(HELLO)
        self._thread = threading.Thread(target=self._run, name="hardpoint-lane", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._link.monitor, zmq.POLLIN)
        poller.register(self._far.fileno(), zmq.POLLIN)
        try:
            while not self._link.lost:
                ready = dict(poller.poll())
                if self._socket in ready and not self._orders():
                    return
                if self._far.fileno() in ready and not self._reports():
                    return
                self._link.look()
        finally:
            self._far.close()
            self._link.close()
            self._socket.close()
            self._context.term()
            if self._lost is not None:
                self._lost()

    def _orders(self) -> bool:
        while self._socket.poll(0):
            kind, *rest = self._socket.recv_multipart()
            if kind == END:
                return False
            if kind == MESSAGE and len(rest) == 1:
                with suppress(BlockingIOError):
                    self._far.send(rest[0])
        return True

    def _reports(self) -> bool:
        while True:
            try:
                report = self._far.recv(LONGEST)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not report:
                return False
            clock = _CLOCK.pack(time.monotonic())
            with suppress(zmq.ZMQError):
                self._socket.send_multipart([MESSAGE, clock, report], zmq.NOBLOCK)
