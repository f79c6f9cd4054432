"""The driver's end of the ZeroMQ channel."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from math import ceil

import zmq

from hardpoint.errors import CallTimeoutError
from hardpoint.rpc.calls import Call
from hardpoint.rpc.channel import (
    CALLER,
    NOBODY,
    THREAD,
    ChannelClosedError,
    Deliver,
    DriverEnd,
    WorkerHandle,
)
from hardpoint.rpc.encoding import Codec, received
from hardpoint.rpc.zeromq.address import Address
from hardpoint.rpc.zeromq.frames import (
    CALL,
    CLOSE,
    FAILURE,
    HELLO,
    LARGEST,
    NOTHING,
    VALUE,
    Header,
    content,
)
from hardpoint.rpc.zeromq.wakers import Waker

MOST_UNANSWERED = 512
"""Calls that a worker may not have answered yet; a further one waits."""
_LOOK_S = 0.005
_SAFETY_S = 1.0
_LINGER_MS = 200


class ZmqDriverEnd(DriverEnd):
    """One ROUTER socket to which every worker connects, each under a name that only it was told.

    Nothing that comes under another name is looked at. All use of the socket is under one lock.
    """

    def __init__(self, world_size: int, spin_s: float, codec: Codec) -> None:
        self.spin_s = spin_s
        self.refused = 0
        """Messages from strangers, or not of this channel's form."""
        self._codec = codec
        self._world_size = world_size
        self._names = [secrets.token_bytes(16) + rank.to_bytes(4, "big") for rank in
                       range(world_size)]  # fmt: skip
        self._ranks = {name: rank for rank, name in enumerate(self._names)}
        self._here: set[int] = set()
        self._sent = 0
        self._answered = [0] * world_size
        self._inbox: deque[tuple[int, Header, list[memoryview]]] = deque()
        self._hasty = False
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._closed = False
        self._armed = NOBODY
        self._blind = False  # the thread sleeps without looking at the socket
        self._wakers = {CALLER: Waker(), THREAD: Waker()}
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by MOST_UNANSWERED
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            self._address = Address(self._socket)
        except BaseException:
            self._socket.close(0)
            self._context.term()
            raise

    def worker_handle(self, rank: int) -> WorkerHandle:
        """Return what worker ``rank`` attaches with: a descriptor, if there is one, and its name,
        which is secret.
        """
        fds = () if self._address.fd < 0 else (self._address.fd,)
        data = {"kind": "zmq", "name": self._names[rank].hex(), **self._address.data()}
        return WorkerHandle(fds=fds, data=data)

    def send(self, call: Call) -> None:
        """Send the call to each worker; its buffers are copied once."""
        data, buffers = self._codec.encode_call(call)
        rank = -1 if call.reply_rank is None else call.reply_rank
        frames = [zmq.Frame(call.name.encode()), zmq.Frame(data), *map(_copied, buffers)]
        deadline = call.deadline
        wait = -1 if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._sending.acquire(timeout=wait):
            raise _late(call)
        try:
            while not self._room():
                if deadline is not None and time.monotonic() >= deadline:
                    raise _late(call)
                time.sleep(_LOOK_S)
            self._sent += 1
            header = Header(
                CALL, self._sent, call.call_id, call.generation, rank, call.queued
            ).pack()
            with self._lock:
                self._require_open()
                for name in self._names:
                    self._put([zmq.Frame(name), zmq.Frame(header), *frames])
                if self._armed and self._readable():
                    self.wake(self._armed)  # sending may have used up the descriptor's signal
        finally:
            self._sending.release()

    def collect(self, deliver: Deliver) -> None:
        """Deliver what has come."""
        with self._lock:
            self._read()
        while self._inbox:
            rank, header, frames = self._inbox.popleft()
            value = failure = None
            if header.kind == VALUE:
                data, buffers = content(frames)
                value = self._codec.parcel(data, buffers)
            elif header.kind == FAILURE:
                failure = received(self._codec, content(frames)[0])
            deliver(header.call_id, rank, header.generation, value, failure)

    def ready(self) -> bool:
        """Whether a message has come."""
        with self._lock:
            return bool(self._inbox) or self._readable()

    def arm(self, who: int) -> None:
        """Note who is to be woken; the thread, if it sleeps without the socket, looks again."""
        self._armed = who
        if who == THREAD and self._blind:
            self.wake(THREAD)

    def sleep(self, who: int, timeout: float | None) -> None:
        """Sleep on the socket, if it is this one's to look at, and on being woken."""
        waker = self._wakers[who]
        poller = zmq.Poller()
        poller.register(waker.fd, zmq.POLLIN)
        self._blind = who == THREAD and self._armed != THREAD
        if self._armed == who:
            self._blind = False
            with self._lock:
                if self._closed:
                    return
                poller.register(self._socket.getsockopt(zmq.FD), zmq.POLLIN)
                if self._inbox or self._readable():
                    return
        seconds = _SAFETY_S if timeout is None else min(timeout, _SAFETY_S)
        poller.poll(ceil(max(0.0, seconds) * 1000))
        self._blind = False
        waker.clear()

    def wake(self, who: int) -> None:
        """Wake who sleeps."""
        self._wakers[who].wake()

    def abandon(self) -> None:
        """Have senders wait for no room any more."""
        self._hasty = True

    def close(self) -> None:
        """Tell the workers and give everything back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            header = Header(CLOSE).pack()
            for rank in sorted(self._here):
                self._put([zmq.Frame(self._names[rank]), zmq.Frame(header)])
            self._socket.close()
        self._address.close()
        self._context.term()
        for waker in self._wakers.values():
            waker.close()

    def _room(self) -> bool:
        """Whether every worker has connected and keeps up."""
        with self._lock:
            self._require_open()
            self._read()
            if self._inbox and self._armed:
                self.wake(self._armed)
            unanswered = self._sent - min(self._answered)
        if len(self._here) < self._world_size or unanswered >= MOST_UNANSWERED:
            if self._hasty:
                raise ChannelClosedError("a message has no room, and the workers are given up")
            return False
        self._address.hide()
        return True

    def _readable(self) -> bool:
        return not self._closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _read(self) -> None:
        """Take from the socket what has come, under the lock."""
        while self._readable():
            name, *frames = self._socket.recv_multipart(copy=False)
            rank = self._ranks.get(name.bytes)
            header = Header.read(frames[0].buffer) if frames else None
            if rank is None or header is None:
                self.refused += 1
            elif header.kind == HELLO:
                self._here.add(rank)
            elif header.kind in (NOTHING, VALUE, FAILURE):
                self._answered[rank] = max(self._answered[rank], min(header.sequence, self._sent))
                self._inbox.append((rank, header, [memoryview(f.buffer) for f in frames[1:]]))
            else:
                self.refused += 1

    def _require_open(self) -> None:
        if self._closed:
            raise ChannelClosedError("the channel is closed")

    def _put(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return  # this worker is gone; its death is told by who watches it


def _copied(buffer: memoryview) -> zmq.Frame:
    """Copy a buffer once, for all workers: its owner may change it when the call is sent."""
    return zmq.Frame(bytes(buffer))


def _late(call: Call) -> CallTimeoutError:
    return CallTimeoutError(f"{call.name!r} could not be sent in time: a worker is behind, or gone")
