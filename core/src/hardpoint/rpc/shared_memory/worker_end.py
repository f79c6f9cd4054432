"""A worker's end of the shared-memory channel."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from hardpoint.errors import EncodingError, UnsupportedError
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.channel import CALLER, ChannelClosedError, WorkerEnd, WorkerHandle
from hardpoint.rpc.codec import Carried, Encoded, Parcel
from hardpoint.rpc.encoding import Codec
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.shared_memory.bell import Event
from hardpoint.rpc.shared_memory.ends import call_layout, reply_layout, text_of
from hardpoint.rpc.shared_memory.images import Part
from hardpoint.rpc.shared_memory.layout import (
    CLOSED,
    DRIVER_SLEEPS,
    FAILURE,
    NOTHING,
    VALUE,
)
from hardpoint.rpc.shared_memory.memory import Fence, Memory
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
        self._calls = RingReader(self._memories[0], calls, rank, room, self._call)
        self._replies = RingWriter(
            self._memories[1], replies, self._own, self._spin_s, self._wake_driver, self._words
        )

    def receive(self, timeout: float | None = None) -> PackedCall | None:
        """Return the next call: at once, after yielding the processor, or after a sleep."""
        if self._closed:
            raise ChannelClosedError("this end of the channel was closed")
        take, words, ready = self._calls.take, self._words, self._calls.ready
        call = take()
        if call is not None:
            return call
        now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        spin_until = now + self._spin_s
        while now < spin_until:
            os.sched_yield()
            if ready() and (call := take()) is not None:
                return call
            now = time.monotonic()
        while True:
            words[self._sleeps] = 1
            self._fence()
            if (call := take()) is not None:
                words[self._sleeps] = 0
                return call
            if words[CLOSED]:
                raise ChannelClosedError("the driver closed the channel")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                words[self._sleeps] = 0
                return None
            self._own.sleep(left)

    def reply(self, reply: Reply) -> None:
        """Write the acknowledgement, with its value or failure."""
        if self._closed:
            raise ChannelClosedError("this end of the channel was closed")
        ids = (reply.call_id, reply.generation, self._rank)
        failure, parcel = reply.failure, reply.value
        if failure is None:
            try:
                encoded = self._encoded(parcel)
            except EncodingError as error:
                failure = RemoteFailure.of(error)
            else:
                if encoded is None:
                    self._replies.put(NOTHING, b"", ids)
                else:
                    self._replies.put(VALUE, b"", ids, encoded.data, encoded.buffers)
        if failure is not None:
            encoded = self._codec.encode(failure, "the call's failure")
            self._replies.put(FAILURE, b"", ids, encoded.data, encoded.buffers)
        self._wake_driver()

    def _encoded(self, parcel: Parcel | None) -> Encoded | None:
        """Return what is sent for a value; None for None."""
        if type(parcel) is Carried:
            value = parcel.value
            return None if value is None else self._codec.encode(value, "the call's result")
        if parcel is None or type(parcel) is Encoded:
            return parcel
        if type(parcel) is bytes:
            return Encoded(parcel)
        raise EncodingError(f"a parcel of {type(parcel).__name__} is not for this channel")

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
        self._fence()
        armed = self._words[DRIVER_SLEEPS]
        who = armed & 3
        if who and armed != self._rung:
            self._rung = armed
            (self._caller if who == CALLER else self._thread).wake()

    def _call(
        self, kind: int, name: bytes, call_id: int, generation: int, rank: int, data: Part,
        buffers: Sequence[memoryview],
    ) -> PackedCall:  # fmt: skip
        return PackedCall(
            call_id=call_id,
            generation=generation,
            name=text_of(name),
            body=self._codec.parcel(data, buffers),
            reply_rank=None if rank < 0 else rank,
        )
