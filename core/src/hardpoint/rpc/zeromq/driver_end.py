"""The driver's end of the ZeroMQ channel."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, inf

import zmq

from hardpoint.errors import CallTimeoutError, EncodingError
from hardpoint.rpc.calls import Call, Gather
from hardpoint.rpc.channel import (
    CALLER,
    NOBODY,
    THREAD,
    ChannelClosedError,
    Deliver,
    DriverEnd,
    WorkerHandle,
)
from hardpoint.rpc.encoding import Buffer, Codec, received
from hardpoint.rpc.zeromq.address import Address, Listening
from hardpoint.rpc.zeromq.frames import (
    CALL,
    CLOSE,
    FAILURE,
    HELLO,
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


class ZmqDriverEnd(DriverEnd):
    """One ROUTER socket to which every worker connects, each under a name that only it was told.

    Nothing that comes under another name is looked at. All use of the socket is under one lock.
    ``listening`` is where they connect, a Unix socket if not given; it is closed with this end.
    ``most_bytes`` may be sent and not answered yet; a further call waits. ``lock`` is the
    socket's, where others use it too.
    """

    def __init__(
        self,
        world_size: int,
        spin_s: float,
        codec: Codec,
        listening: Listening | None = None,
        *,
        most_bytes: float = inf,
        lock: threading.Lock | None = None,
    ) -> None:
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
        self._sizes: deque[tuple[int, int]] = deque()
        self._bytes, self._most_bytes = 0, most_bytes
        self._inbox: deque[tuple[int, Header, list[memoryview]]] = deque()
        self._hasty = False
        self._lock = threading.Lock() if lock is None else lock
        self._sending = threading.Lock()
        self._closed = False
        self._armed = NOBODY
        self._blind = False  # the thread sleeps without looking at the socket
        self._wakers = {CALLER: Waker(), THREAD: Waker()}
        self._listening = Address() if listening is None else listening
        self._socket = self._listening.socket

    def worker_handle(self, rank: int) -> WorkerHandle:
        """Return what worker ``rank`` attaches with: a descriptor, if there is one, and its name,
        which is secret.
        """
        of = self._listening
        fds = () if of.fd < 0 else (of.fd,)
        data = {"kind": of.kind, "name": self._names[rank].hex(), **of.data(rank)}
        return WorkerHandle(fds=fds, data=data)

    def send(self, call: Call) -> None:
        """Send the call to each worker; its buffers are copied once."""
        self.reserve(call)()

    def reserve(self, call: Call) -> Callable[[], None]:
        """Encode the call and wait, until its deadline, for every worker to have room for it;
        return what sends it. Raises as :meth:`send`.
        """
        data, buffers = self._codec.encode_call(call)
        copies = [bytes(buffer) for buffer in buffers]  # its owner may change it afterwards
        size = len(data) + sum(map(len, copies))
        self._fit(call, max(map(len, (data, *copies))))
        deadline = call.deadline
        wait = -1 if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._sending.acquire(timeout=wait):
            raise _late(call)
        try:
            while not self._room(size):
                if deadline is not None and time.monotonic() >= deadline:
                    raise _late(call)
                time.sleep(_LOOK_S)
        finally:
            self._sending.release()
        return partial(self._send, call, [call.name.encode(), data, *copies], size)

    def _fit(self, call: Call, longest: int) -> None:
        if longest > self._listening.largest:
            raise EncodingError(
                f"{call.name!r} carries {longest} bytes in one piece; this channel takes "
                f"{self._listening.largest}"
            )

    def _send(self, call: Call, pieces: Sequence[Buffer], size: int) -> None:
        frames = [zmq.Frame(piece) for piece in pieces]
        rank = -1 if call.reply_rank is None else call.reply_rank
        with self._lock:
            self._require_open()
            self._sent += 1
            self._sizes.append((self._sent, size))
            self._bytes += size
            header = Header(
                CALL, self._sent, call.call_id, call.generation, rank, call.queued
            ).pack()
            for name in self._names:
                self._put([zmq.Frame(name), zmq.Frame(header), *frames])
            if self._armed and self._readable():
                self.wake(self._armed)  # sending may have used up the descriptor's signal

    def collect(self, deliver: Deliver, calls: Mapping[int, Gather] | None = None) -> None:
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

    def await_reply(self, waker: Waker, timeout: float | None) -> None:
        """Wait until a message comes, or ``waker`` is woken; with no ``timeout``, for the latter
        alone. For a thread beside those that sleep here. May return early.
        """
        poller = zmq.Poller()
        poller.register(waker.fd, zmq.POLLIN)
        if timeout is not None:
            with self._lock:
                if self._closed or self._inbox or self._readable():
                    return
                poller.register(self._socket.getsockopt(zmq.FD), zmq.POLLIN)
        poller.poll(None if timeout is None else ceil(timeout * 1000))
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
        self._listening.close()
        for waker in self._wakers.values():
            waker.close()

    def _room(self, size: int) -> bool:
        """Whether every worker has connected and keeps up."""
        with self._lock:
            self._require_open()
            self._read()
            if self._inbox and self._armed:
                self.wake(self._armed)
            answered = min(self._answered)
            while self._sizes and self._sizes[0][0] <= answered:
                self._bytes -= self._sizes.popleft()[1]
            full = self._sent - answered >= MOST_UNANSWERED or (
                self._bytes and self._bytes + size > self._most_bytes
            )
        if full or len(self._here) < self._world_size:
            if self._hasty:
                raise ChannelClosedError("a message has no room, and the workers are given up")
            return False
        self._listening.hide()
        return True

    def _readable(self) -> bool:
        return not self._closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _read(self) -> None:
        """Take from the socket what has come, under the lock."""
        while self._readable():
            name, *frames = self._socket.recv_multipart(copy=False)
            rank = self._ranks.get(name.bytes)
            header = Header.read(frames[0].buffer) if frames else None
            if rank is None or header is None or not self._listening.admits(name, rank):
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


def _late(call: Call) -> CallTimeoutError:
    return CallTimeoutError(f"{call.name!r} could not be sent in time: a worker is behind, or gone")
