"""A worker's end of the shared-memory channel."""

from __future__ import annotations

import time

from hardpoint.errors import EncodingError, UnsupportedError
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.channel import CALLER, ChannelClosedError, WorkerEnd, WorkerHandle
from hardpoint.rpc.codec import Parcel
from hardpoint.rpc.encoding import Codec, encoded_value
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.shared_memory.bell import SAFETY_S, Event
from hardpoint.rpc.shared_memory.ends import Names, call_layout, reply_layout
from hardpoint.rpc.shared_memory.inline import Message, hot_path
from hardpoint.rpc.shared_memory.layout import (
    CLOSED,
    DRIVER_SLEEPS,
    FAILURE,
    NOTHING,
    QUEUED,
    VALUE,
)
from hardpoint.rpc.shared_memory.memory import Memory
from hardpoint.rpc.shared_memory.parting import CROWD
from hardpoint.rpc.shared_memory.ring_reader import RingReader
from hardpoint.rpc.shared_memory.ring_writer import RingWriter


class SharedWorkerEnd(WorkerEnd):
    """Reads the broadcast ring as reader ``rank``, writes its own reply ring."""

    def __init__(self, handle: WorkerHandle, rank: int, codec: Codec) -> None:
        data = handle.data
        if len(handle.fds) != 6 or not 0 <= rank < data["world_size"]:
            raise UnsupportedError(f"a handle of {len(handle.fds)} descriptors", f"rank {rank}")
        calls, replies = call_layout(data), reply_layout(data)
        self._rank = rank
        self._codec = codec
        self._spin_s: float = data["spin_s"]
        self._closed = False
        self._rung = 0
        self._memories = (
            Memory.attach(handle.fds[0], calls.size),
            Memory.attach(handle.fds[1], replies.size),
        )
        self._events = tuple(Event(fd) for fd in handle.fds[2:])
        self._own, self._caller, self._thread, room = self._events
        self._words = self._memories[0].words
        self._sleeps = calls.sleeps(rank)
        hot = hot_path(data["native"])
        crowd = str(CROWD) if data.get("apart") else None
        self._calls = RingReader(self._memories[0], calls, rank, room, hot=hot, crowd=crowd)
        self._next, self._rest = self._calls.inline.next, self._calls.inline.sleep
        self._names = Names()
        self._known = self._names.decoded
        self._bare = codec.bare
        wake = self._wake_driver
        self._replies = RingWriter(
            self._memories[1], replies, self._own, self._spin_s, wake, self._words, hot
        )
        self._put_plain = self._replies.inline.put_plain

    def receive(self, timeout: float | None = None) -> PackedCall | None:
        """Return the next call: at once, after yielding the processor, or after a sleep."""
        if self._closed:
            raise ChannelClosedError("this end of the channel was closed")
        message = self._next(self._spin_s)
        if message is None or message is NotImplemented:
            message = self._calls.take() or self._sleep(timeout)
            if message is None:
                return None
        kind, call_id, generation, rank, name, data, buffers = message
        if self._bare and type(data) is bytes:  # then there are no buffers
            body: Parcel = data
        else:
            body = self._codec.parcel(data, buffers)
        text = self._known.get(name)
        if text is None:
            text = self._names.decode(name)
        asked = None if rank < 0 else rank
        return PackedCall(call_id, generation, text, body, asked, kind == QUEUED)

    def _sleep(self, timeout: float | None) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SAFETY_S if deadline is None else max(0.0, deadline - time.monotonic())
            if self._rest(self._own.fd, min(left, SAFETY_S), self._sleeps):
                message: Message | None = self._next(self._spin_s)
                if message is NotImplemented:
                    message = self._calls.take()
                if message is not None:
                    return message
            elif self._words[CLOSED]:
                raise ChannelClosedError("the driver closed the channel")
            else:
                self._replies.tidy()
            if not left:
                self._words[self._sleeps] = 0
                return None

    def reply(self, reply: Reply) -> None:
        """Write the acknowledgement, with its value or failure."""
        if self._closed:
            raise ChannelClosedError("this end of the channel was closed")
        plain = self._bare and reply.of
        if not plain or not self._put_plain(
            VALUE, reply.call_id, reply.generation, self._rank, b"", reply.value
        ):
            self._answer(reply)
        armed = self._words[DRIVER_SLEEPS]
        if armed & 3 and armed != self._rung:
            self._wake_driver()

    def _answer(self, reply: Reply) -> None:
        ids = (reply.call_id, reply.generation, self._rank)
        failure = reply.failure
        if failure is None:
            try:
                encoded = encoded_value(self._codec, reply)
            except EncodingError as error:
                failure = RemoteFailure.of(error, encode=self._codec.encode_exception)
            else:
                if encoded is None:
                    self._replies.put(NOTHING, *ids)
                else:
                    self._replies.put(VALUE, *ids, b"", encoded.data, encoded.buffers)
        if failure is not None:
            encoded = self._codec.encode(failure, "the call's failure")
            self._replies.put(FAILURE, *ids, b"", encoded.data, encoded.buffers)

    def close(self) -> None:
        """Give everything back, save memory of which views are still held."""
        if self._closed:
            return
        self._closed = True
        self._calls.close()
        self._replies.release()
        for memory in self._memories:
            memory.close()
        for event in self._events:
            event.close()

    def _wake_driver(self) -> None:
        armed = self._words[DRIVER_SLEEPS]
        who = armed & 3
        if who and armed != self._rung:
            self._rung = armed
            (self._caller if who == CALLER else self._thread).wake()
