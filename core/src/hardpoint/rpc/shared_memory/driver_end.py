"""The driver's end of the shared-memory channel."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hardpoint.errors import CallTimeoutError
from hardpoint.rpc.calls import Call
from hardpoint.rpc.channel import (
    CALLER,
    THREAD,
    ChannelClosedError,
    Deliver,
    DriverEnd,
    WorkerHandle,
)
from hardpoint.rpc.codec import Parcel
from hardpoint.rpc.encoding import Buffer, Codec, received
from hardpoint.rpc.shared_memory.bell import Event, make_event
from hardpoint.rpc.shared_memory.ends import (
    ARENA,
    CALL_RING,
    REPLY_RING,
    Names,
    call_layout,
    reply_layout,
)
from hardpoint.rpc.shared_memory.layout import (
    CALL,
    CLOSED,
    DRIVER_SLEEPS,
    HEAD,
    NOTHING,
    QUEUED,
    VALUE,
)
from hardpoint.rpc.shared_memory.memory import Fence, Memory
from hardpoint.rpc.shared_memory.ring_reader import RingReader
from hardpoint.rpc.shared_memory.ring_writer import RingWriter


class SharedDriverEnd(DriverEnd):
    """One broadcast ring and a reply ring for each worker."""

    def __init__(self, world_size: int, spin_s: float, codec: Codec) -> None:
        self.spin_s = spin_s
        self._codec = codec
        self._data = {
            "kind": "shared_memory",
            "world_size": world_size,
            "spin_s": spin_s,
            "call_ring": CALL_RING,
            "reply_ring": REPLY_RING,
            "arena": ARENA,
        }
        self._memories: list[Memory] = []
        self._events: list[Event] = []
        self._names = Names()
        self._known = self._names.encoded
        self._bare = codec.bare
        self._plain = codec.plain_arguments
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
        self._workers = [self._event() for _ in range(world_size)]
        self._words = calls.words
        self._sleeps = [(layout.sleeps(rank), self._workers[rank]) for rank in range(world_size)]
        begin = 8 * layout.sleeps(0)
        self._map, self._flags = calls.map, slice(begin, begin + 8 * world_size)
        self._awake = bytes(8 * world_size)
        self._writer = RingWriter(calls, layout, room, self.spin_s, self._wake_workers)
        self._fence = Fence()
        replies = reply_layout(self._data)
        self._readers = [
            RingReader(self._memory(replies.size), replies, 0, self._workers[rank], name=rank)
            for rank in range(world_size)
        ]
        self._rings = [(reader.words, reader) for reader in self._readers]

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
            self._wake_workers()

    def send(self, call: Call) -> None:
        """Write the call once, for all workers."""
        data: Buffer | None = None
        buffers: Sequence[memoryview] = ()
        method, rank = call.method, call.reply_rank
        name = self._known.get(method) if type(method) is str else None
        if name is not None and not call.kwargs:
            data = self._plain(call.args)
        if name is None or data is None:
            data, buffers = self._codec.encode_call(call)
            name = self._names.encode(call.name)
        kind = QUEUED if call.queued else CALL
        if rank is None:
            rank = -1
        deadline, lock = call.deadline, self._lock
        if not (lock.acquire() if deadline is None else lock.acquire(timeout=_left(deadline))):
            raise CallTimeoutError(f"{call.name!r} could not be sent in time: others are waiting")
        try:
            if self._closed:
                raise ChannelClosedError(f"{call.name!r} was not sent: the channel is closed")
            self._writer.put(
                kind, call.call_id, call.generation, rank, name, data, buffers, deadline
            )
        finally:
            lock.release()  # a full fence, too: what follows reads after the call is visible
        self._wake_workers()
        self._large = bool(buffers)

    def collect(self, deliver: Deliver) -> None:
        """Deliver what is in the reply rings; a ring's owner speaks for itself alone."""
        bare = self._bare
        for words, reader in self._rings:
            while words[HEAD] != reader.tail:
                message = reader.take()
                if message is None:
                    continue
                kind, call_id, generation, _, _, data, buffers = message
                if kind == VALUE:
                    if bare and type(data) is bytes:  # then there are no buffers
                        value: Parcel = data
                    else:
                        value = self._codec.parcel(data, buffers)
                    deliver(call_id, reader.name, generation, value, None)
                elif kind == NOTHING:
                    deliver(call_id, reader.name, generation, None, None)
                else:
                    failure = received(self._codec, data)
                    deliver(call_id, reader.name, generation, None, failure)

    def ready(self) -> bool:
        """Whether any reply ring has a frame."""
        return any(reader.ready() for reader in self._readers)

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
        for memory in self._memories:
            memory.close()
        for event in self._events:
            event.close()

    def _wake_workers(self) -> None:
        try:
            if self._map[self._flags] == self._awake:
                return
            words = self._words
            for sleeps, worker in self._sleeps:
                if words[sleeps]:
                    words[sleeps] = 0
                    worker.wake()
        except ValueError:  # closed meanwhile, when all were woken
            return

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
