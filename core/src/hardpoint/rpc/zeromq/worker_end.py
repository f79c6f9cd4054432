"""A worker's end of the ZeroMQ channel."""

from __future__ import annotations

import os
import time
from math import ceil

import zmq

from hardpoint.errors import EncodingError
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.channel import ChannelClosedError, WorkerEnd, WorkerHandle
from hardpoint.rpc.codec import Encoded
from hardpoint.rpc.encoding import Codec, encoded_value
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.zeromq.address import LINGER_MS, connected
from hardpoint.rpc.zeromq.frames import (
    CALL,
    CLOSE,
    FAILURE,
    HELLO,
    LARGEST,
    NOTHING,
    VALUE,
    Header,
    call_of,
)


class ZmqWorkerEnd(WorkerEnd):
    """A DEALER socket with the name that the driver gave this worker."""

    def __init__(self, handle: WorkerHandle, rank: int, codec: Codec) -> None:
        self._codec = codec
        self._rank = rank
        self._fds = handle.fds
        self._sequence = 0
        self._closed = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(handle.data["name"]))
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the driver
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._connect(handle)
        self._socket.send(Header(HELLO).pack())

    def _connect(self, handle: WorkerHandle) -> None:
        connected(self._socket, handle.fds, handle.data.get("path"))

    def _disconnect(self) -> None:
        """Give back what :meth:`_connect` made."""

    def _comes(self, seconds: float | None) -> bool:
        """Wait for a message."""
        return bool(self._socket.poll(None if seconds is None else ceil(seconds * 1000)))

    def _fits(self, reply: Reply, encoded: Encoded | None) -> None:
        """Raise EncodingError for a value that the driver would not take."""

    def receive(self, timeout: float | None = None) -> PackedCall | None:
        """Return the next call, or None after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._closed:
                raise ChannelClosedError("this end of the channel was closed")
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._comes(left):
                return None
            first, *rest = self._socket.recv_multipart(copy=False)
            header = Header.read(first.buffer)
            if header is None:
                continue
            if header.kind == CLOSE:
                raise ChannelClosedError("the driver closed the channel")
            if header.kind == CALL:
                self._sequence = header.sequence
                return call_of(header, [memoryview(f.buffer) for f in rest], self._codec)

    def reply(self, reply: Reply) -> None:
        """Send the acknowledgement, with its value or failure."""
        if self._closed:
            raise ChannelClosedError("this end of the channel was closed")
        failure, encoded, kind = reply.failure, None, NOTHING
        if failure is None:
            try:
                encoded = encoded_value(self._codec, reply)
                self._fits(reply, encoded)
                kind = NOTHING if encoded is None else VALUE
            except EncodingError as error:
                failure = RemoteFailure.of(error, encode=self._codec.encode_exception)
        if failure is not None:
            encoded, kind = self._codec.encode(failure, "the call's failure"), FAILURE
        header = Header(kind, self._sequence, reply.call_id, reply.generation, self._rank)
        self._socket.send_multipart([header.pack(), *_frames(encoded)])

    def close(self) -> None:
        """Give everything back; replies that were not sent yet have a moment. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._disconnect()
        self._socket.close()
        self._context.term()
        for fd in self._fds:
            os.close(fd)


def _frames(encoded: Encoded | None) -> list[bytes | memoryview]:
    return [] if encoded is None else [encoded.data, *encoded.buffers]
