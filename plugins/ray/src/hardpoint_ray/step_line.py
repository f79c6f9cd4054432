"""A worker's side of the graph: the thread on which Ray runs it, and the worker's own, meet here.

The order of calls is the channel's: a step comes there too, by name alone, after :data:`MARK`. What
it computes with came by the graph, and what it hands on, or answers, goes back to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from attrs import evolve
from hardpoint.errors import EncodingError, HardpointError
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.codec import Carried
from hardpoint.rpc.encoding import Codec, encoded_value
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.worker_process import CallEnd

from hardpoint_ray.frames import joined, parted, size_of

MARK = "by graph: "
"""Before the name of a call whose arguments come by the graph: no method's name has a blank."""
LARGEST = 990_000
"""Bytes of a step, or of an answer, that the graph carries; what is larger goes by the channel, as
Ray would make all of its channels anew for it.
"""
LOOK_SECONDS = 0.05
"""How often a worker that awaits a step looks whether the driver wants it to leave."""


class GraphOrderError(HardpointError):
    """Ray's graph gave a worker another step than the one whose turn it was.

    What to do: report it, with the version of Ray; the executor ``ray`` has no graph.
    """


class StepLine:
    """One step at a time: given by the graph, taken by the worker, answered to the graph.

    To the worker it is the :class:`hardpoint.stages.StageCarrier`. ``most`` are the bytes that a
    step may hand on, None: any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._given: tuple[bytes, bytes] | None = None
        self._answer: bytes | None = None
        self._closed = False
        self._from_before: list[memoryview] = []
        self._to_next: list[bytes] = []

    # On the graph's thread.

    def run(self, order: bytes, carried: bytes) -> bytes:
        """Have the worker run one step; return what goes to the next stage or, of the last one, to
        the driver. Nothing once the worker has left.
        """
        with self._changed:
            self._given, self._answer = (order, carried), None
            self._changed.notify_all()
            while self._answer is None and not self._closed:
                self._changed.wait()
            self._given = None
            return self._answer or b""

    # On the worker's thread.

    def take(self, call_id: int, leaves: Callable[[], bool]) -> list[memoryview] | None:
        """Wait for the step of a call; return the pieces of its arguments, or None if the worker
        is to leave first.
        """
        with self._changed:
            while self._given is None or self._answer is not None:
                if self._closed or leaves():
                    return None
                self._changed.wait(LOOK_SECONDS)
            order, carried = self._given
        number, *pieces = parted(order)
        if int.from_bytes(number, "little") != call_id:
            raise GraphOrderError(
                f"the graph brought call {int.from_bytes(number, 'little')}, and call {call_id} "
                "was its turn"
            )
        self._from_before, self._to_next = parted(carried), []
        return pieces

    def answer(self, pieces: Sequence[bytes | memoryview] | None = None) -> None:
        """End the step that was taken: by ``pieces``, else by what was handed on."""
        data = joined(self._to_next if pieces is None else pieces)
        with self._changed:
            self._answer = data
            self._changed.notify_all()

    def hand_on(self, data: bytes) -> None:
        """Have the next stage get ``data`` with this step. Raises EncodingError for too much."""
        total = len(data) + sum(map(len, self._to_next))
        if self._most is not None and total > self._most:
            raise EncodingError(
                f"a pipeline stage would hand on {total} bytes in one step, and Ray's channel to "
                f"another node holds {self._most}: lower max_num_batched_tokens, or choose the "
                "executor ray"
            )
        self._to_next.append(data)

    def handed_on(self) -> memoryview | None:
        """Return the next of what the stage before handed on with this step; None: no more."""
        return self._from_before.pop(0) if self._from_before else None

    def close(self) -> None:
        """The worker has left: let the graph wait no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class GraphEnd:
    """A worker's end of its channel, to which the graph brings what steps compute with.

    ``answers``: whether this rank's values go to the driver by the graph.
    """

    def __init__(
        self, end: CallEnd, codec: Codec, line: StepLine, leaves: Callable[[], bool], answers: bool
    ) -> None:
        self._end = end
        self._codec = codec
        self._line = line
        self._leaves = leaves
        self._answers = answers
        self._step: int | None = None

    def receive(self, timeout: float | None = None) -> PackedCall | None:
        """Return the next call, with its arguments."""
        if self._step is not None:  # nobody answered it
            self._finish()
        call = self._end.receive(timeout)
        if call is None or not call.name.startswith(MARK):
            return call
        pieces = self._line.take(call.call_id, self._leaves)
        name = call.name.removeprefix(MARK)
        if pieces:
            data, *buffers = pieces
            call.body = self._codec.parcel(bytes(data), buffers)
        elif pieces is not None:  # they were too large for the graph
            _, args, kwargs = call.unpack()
            call.body = Carried((name, args, kwargs))
        self._step = None if pieces is None else call.call_id
        call.name = name
        return call

    def reply(self, reply: Reply) -> None:
        """Acknowledge a call: a step that has a value for the driver by the graph, all others by
        the channel.
        """
        if self._step is None or self._step != reply.call_id:
            self._end.reply(reply)
            return
        if self._answers and reply.failure is None and reply.value is not None:
            try:
                encoded = encoded_value(self._codec, reply)
            except EncodingError as error:
                failure = RemoteFailure.of(error, encode=self._codec.encode_exception)
                reply = evolve(reply, value=None, failure=failure, of="")
            else:
                pieces = () if encoded is None else (encoded.data, *encoded.buffers)
                if 0 < size_of(pieces) <= LARGEST:
                    self._finish(pieces)
                    return
        self._finish()
        self._end.reply(reply)

    def close(self) -> None:
        """Close the channel, and have the graph await nothing."""
        self._line.close()
        self._end.close()

    def _finish(self, pieces: Sequence[bytes | memoryview] | None = None) -> None:
        self._step = None
        self._line.answer(pieces)
