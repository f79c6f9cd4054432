"""A worker's end of the shared-memory channel."""

from __future__ import annotations

import os
import threading
import time

from hardpoint.errors import EncodingError, UnsupportedError
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.channel import CALLER, ChannelClosedError, WorkerEnd, WorkerHandle
from hardpoint.rpc.codec import Parcel
from hardpoint.rpc.encoding import Codec, encoded_value
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.shared_memory.bell import Event
from hardpoint.rpc.shared_memory.ends import Names, call_layout, reply_layout
from hardpoint.rpc.shared_memory.layout import (
    CLOSED,
    DRIVER_SLEEPS,
    FAILURE,
    HEAD,
    NOTHING,
    QUEUED,
    VALUE,
)
from hardpoint.rpc.shared_memory.memory import Fence, Memory
from hardpoint.rpc.shared_memory.ring_reader import Message, RingReader
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
        self._fence = Fence()
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
        self._calls = RingReader(self._memories[0], calls, rank, room)
        self._names = Names()
        self._known = self._names.decoded
        self._bare = codec.bare
        self._plain = codec.plain
        fence = threading.Lock()
        self._pass, self._go_on = fence.acquire, fence.release
        self._replies = RingWriter(
            self._memories[1], replies, self._own, self._spin_s, self._wake_driver, self._words
        )

    def receive(self, timeout: float | None = None) -> PackedCall | None:
        """Return the next call: at once, after yielding the processor, or after a sleep."""
        if self._closed:
            raise ChannelClosedError("this end of the channel was closed")
        calls = self._calls
        message = calls.take() if self._words[HEAD] != calls.tail else None
        if message is None:
            message = self._spin(calls) or self._sleep(calls, timeout)
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

    def _spin(self, ring: RingReader) -> Message | None:
        words, tail, end = ring.words, ring.tail, 0.0
        while self._spin_s:
            os.sched_yield()  # first of all: who is to run next may need this core
            if words[HEAD] != tail:
                message = ring.take()
                if message is not None:
                    return message
                tail = ring.tail
            now = time.monotonic()
            if not end:
                end = now + self._spin_s
            elif now >= end:
                break
        return None

    def _sleep(self, ring: RingReader, timeout: float | None) -> Message | None:
        words, sleeps = self._words, self._sleeps
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            words[sleeps] = 1
            self._fence()
            message = ring.take()
            if message is None and words[CLOSED]:
                raise ChannelClosedError("the driver closed the channel")
            left = None if deadline is None else deadline - time.monotonic()
            if message is not None or (left is not None and left <= 0):
                words[sleeps] = 0
                return message
            self._own.sleep(left)
            if not words[sleeps] or words[HEAD] != ring.tail:  # rung: a call is here, or soon
                words[sleeps] = 0
                message = ring.take() or self._spin(ring)
                if message is not None:
                    return message
            else:
                self._replies.tidy()

    def reply(self, reply: Reply) -> None:
        """Write the acknowledgement, with its value or failure."""
        if self._closed:
            raise ChannelClosedError("this end of the channel was closed")
        data = self._plain(reply.value) if reply.of else None
        if data is None:
            self._answer(reply)
        else:
            self._replies.put(VALUE, reply.call_id, reply.generation, self._rank, b"", data)
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
        for memory in self._memories:
            memory.close()
        for event in self._events:
            event.close()

    def _wake_driver(self) -> None:
        # The lock is a full fence (see Fence), spelt out: the flag is read after the reply is out.
        self._pass()
        self._go_on()
        armed = self._words[DRIVER_SLEEPS]
        who = armed & 3
        if who and armed != self._rung:
            self._rung = armed
            (self._caller if who == CALLER else self._thread).wake()
