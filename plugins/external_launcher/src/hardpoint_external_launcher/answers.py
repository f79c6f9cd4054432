"""Answers of workers, as frames and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.errors import EncodingError
from hardpoint.rpc.encoding import encoded_value, received
from hardpoint.rpc.failures import RemoteFailure

from hardpoint_external_launcher.frames import Frame, Kind

if TYPE_CHECKING:
    from hardpoint.rpc.calls import CallTable, Reply
    from hardpoint.rpc.encoding import Codec

ANSWERS = frozenset({Kind.NOTHING, Kind.VALUE, Kind.FAILURE})


def answer(codec: Codec, reply: Reply) -> Frame:
    """Return a reply as it travels; what cannot travel is a failure."""
    failure, encoded, kind = reply.failure, None, Kind.NOTHING
    if failure is None:
        try:
            encoded = encoded_value(codec, reply)
            kind = Kind.NOTHING if encoded is None else Kind.VALUE
        except EncodingError as error:
            failure = RemoteFailure.of(error, encode=codec.encode_exception)
    if failure is not None:
        encoded, kind = codec.encode(failure, "the call's failure"), Kind.FAILURE
    parts = () if encoded is None else (encoded.data, *encoded.buffers)
    return Frame(kind, reply.call_id, reply.generation, parts)


def acknowledge(calls: CallTable, codec: Codec, rank: int, frame: Frame) -> None:
    """Give one rank's answer to its call."""
    value = failure = None
    if frame.kind == Kind.VALUE:
        buffers = [memoryview(part) for part in frame.parts[1:]]
        value = codec.parcel(frame.parts[0], buffers)
    elif frame.kind == Kind.FAILURE:
        failure = received(codec, frame.parts[0])
    calls.acknowledge(frame.call_id, rank, frame.generation, value, failure)
