"""The driver's end of the shared-memory channel."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from hardpoint.errors import CallTimeoutError
from hardpoint.rpc.calls import Call, Gather
from hardpoint.rpc.channel import (
    CALLER,
    THREAD,
    ChannelClosedError,
    Deliver,
    DriverEnd,
    WorkerHandle,
)
from hardpoint.rpc.encoding import Codec, received
from hardpoint.rpc.shared_memory.bell import Event, make_event
from hardpoint.rpc.shared_memory.ends import (
    ARENA,
    CALL_RING,
    REPLY_RING,
    Names,
    call_layout,
    reply_layout,
)
from hardpoint.rpc.shared_memory.inline import hot_path
from hardpoint.rpc.shared_memory.layout import (
    CALL,
    CLOSED,
    DRIVER_SLEEPS,
    NOTHING,
    QUEUED,
    VALUE,
)
from hardpoint.rpc.shared_memory.memory import Fence, Memory
from hardpoint.rpc.shared_memory.parting import has_room
from hardpoint.rpc.shared_memory.ring_reader import RingReader
from hardpoint.rpc.shared_memory.ring_writer import RingWriter


class SharedDriverEnd(DriverEnd):
    """One broadcast ring and a reply ring for each worker."""

    def __init__(
        self, world_size: int, spin_s: float, codec: Codec, *, native: bool = True
    ) -> None:
        self.spin_s = spin_s
        self._codec = codec
        self._native = native
        self._data = {
            "kind": "shared_memory",
            "world_size": world_size,
            "spin_s": spin_s,
            "call_ring": CALL_RING,
            "reply_ring": REPLY_RING,
            "arena": ARENA,
            "native": native,
            "apart": has_room(world_size),
        }
        self._memories: list[Memory] = []
        self._events: list[Event] = []
        self._names = Names()
        self._known = self._names.encoded
        self._bare = codec.bare
        self._lock = threading.Lock()
        self._closed = False
        self._large = False
        self._armed = 0  # who sleeps, and how often somebody did
        try:
            self._open(world_size)
        except BaseException:
            self.close()
            raise

    def _open(self, world_size: int) -> None:
        layout = call_layout(self._data)
        calls = self._memory(layout.size)
        self._caller, self._thread, room = (self._event() for _ in range(3))
        self._workers = tuple(self._event() for _ in range(world_size))
        self._words = calls.words
        hot = hot_path(self._native)
        self._writer = RingWriter(calls, layout, room, self.spin_s, self._wake_workers, hot=hot)
        self._put_plain, self._wake = self._writer.inline.put_plain, self._writer.inline.wake
        self._fence = Fence()
        replies = reply_layout(self._data)
        self._readers = [
            RingReader(self._memory(replies.size), replies, 0, self._workers[rank], hot=hot)
            for rank in range(world_size)
        ]
        self._rings = hot.ReplyRings(tuple(reader.inline for reader in self._readers))

    def worker_handle(self, rank: int) -> WorkerHandle:
        """Return what worker ``rank`` attaches with: six descriptors, and sizes."""
        calls, replies = self._memories[0], self._memories[1 + rank]
        caller, thread, room = self._events[:3]
        fds = (calls.fd, replies.fd, self._workers[rank].fd, caller.fd, thread.fd, room.fd)
        return WorkerHandle(fds=fds, data=self._data)

    def rouse(self) -> None:
        """Wake the workers that sleep: they wake up while the call is being made.

        Not after a large one, which is likely to be followed by another: copying it takes so long
        that they would sleep again.
        """
        if not self._large:
            self._wake(self._workers)

    def send(self, call: Call) -> None:
        """Write the call once, for all workers."""
        method, rank = call.method, call.reply_rank
        name = self._known.get(method) if type(method) is str else None
        kind = QUEUED if call.queued else CALL
        ids = (kind, call.call_id, call.generation, -1 if rank is None else rank)
        if name is None or call.kwargs or not self._bare or not self._send_plain(*ids, name, call):
            self._send_encoded(ids, call)
        self._wake(self._workers)

    def _send_plain(
        self, kind: int, call_id: int, generation: int, rank: int, name: bytes, call: Call
    ) -> bool:
        """Write the call if its arguments are plain and nothing has to be waited for."""
        if not self._lock.acquire(False):
            return False
        try:
            if self._closed:
                return False
            self._large = False
            return self._put_plain(kind, call_id, generation, rank, name, call.args) is True
        finally:
            self._lock.release()

    def _send_encoded(self, ids: tuple[int, int, int, int], call: Call) -> None:
        data, buffers = self._codec.encode_call(call)
        name = self._names.encode(call.name)
        deadline, lock = call.deadline, self._lock
        if not (lock.acquire() if deadline is None else lock.acquire(timeout=_left(deadline))):
            raise CallTimeoutError(f"{call.name!r} could not be sent in time: others are waiting")
        try:
            if self._closed:
                raise ChannelClosedError(f"{call.name!r} was not sent: the channel is closed")
            self._writer.put(*ids, name, data, buffers, deadline)
        finally:
            lock.release()
        self._large = bool(buffers)

    def collect(self, deliver: Deliver, calls: Mapping[int, Gather] | None = None) -> None:
        """Deliver what is in the reply rings; a ring's owner speaks for itself alone."""
        if self._bare:
            while (rank := self._rings.collect(deliver, calls)) >= 0:
                self._deliver(rank, deliver)
            return
        for rank, reader in enumerate(self._readers):
            while reader.ready():
                self._deliver(rank, deliver)

    def _deliver(self, rank: int, deliver: Deliver) -> None:
        """Deliver the next message of a rank, whatever it is."""
        message = self._readers[rank].take()
        if message is None:
            return
        kind, call_id, generation, _, _, data, buffers = message
        if kind == VALUE:
            deliver(call_id, rank, generation, self._codec.parcel(data, buffers), None)
        elif kind == NOTHING:
            deliver(call_id, rank, generation, None, None)
        else:
            deliver(call_id, rank, generation, None, received(self._codec, data))

    def spin(self, seconds: float, wanted: int) -> bool:
        """Yield the processor while workers are at work."""
        return self._rings.spin(seconds, wanted) > 0

    def ready(self) -> bool:
        """Whether any reply ring has a frame."""
        return self._rings.ready() > 0

    def arm(self, who: int) -> None:
        """Write who sleeps, and a number that is new each time: a worker rings once for each."""
        if who:
            self._armed = (self._armed | 3) + 1 | who
            self._words[DRIVER_SLEEPS] = self._armed
            self._fence()
        elif self._armed & 3:
            self._armed &= ~3
            self._words[DRIVER_SLEEPS] = self._armed

    def sleep(self, who: int, timeout: float | None) -> None:
        """Sleep on the event of ``who``."""
        (self._caller if who == CALLER else self._thread).sleep(timeout)

    def wake(self, who: int) -> None:
        """Ring the event of ``who``."""
        (self._thread if who == THREAD else self._caller).wake()

    def abandon(self) -> None:
        """Have senders wait for no room any more."""
        self._writer.hasty = True

    def tidy(self) -> None:
        """Give memory of the broadcast ring back, unless somebody is sending."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._writer.tidy()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Tell the workers and give everything back."""
        if not self._closed and self._memories:
            self._memories[0].words[CLOSED] = 1  # first of all: a sender may wait for room
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for event in self._events:
            event.wake()
        for reader in getattr(self, "_readers", ()):
            reader.close()
        if hasattr(self, "_writer"):
            self._writer.release()
        for memory in self._memories:
            memory.close()
        for event in self._events:
            event.close()

    def _wake_workers(self) -> None:
        self._wake(self._workers)

    def _memory(self, size: int) -> Memory:
        memory = Memory.create(size)
        self._memories.append(memory)
        return memory

    def _event(self) -> Event:
        event = Event(make_event())
        self._events.append(event)
        return event


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
