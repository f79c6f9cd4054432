"""What the ranks do together: all run one program, or rank 0 has the others carry out its calls."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hardpoint.errors import ExecutorFailedError, HardpointError
from hardpoint.rpc.calls import Reply

from hardpoint_external_launcher.agreement import check_digests, digests
from hardpoint_external_launcher.answers import ANSWERS, acknowledge, answer
from hardpoint_external_launcher.frames import Frame, Kind

if TYPE_CHECKING:
    from hardpoint.rpc.calls import Call, CallTable, PackedCall
    from hardpoint.rpc.encoding import Codec
    from hardpoint.rpc.host import WorkerHost
    from hardpoint.rpc.worker_thread import WorkerThread

    from hardpoint_external_launcher.peers import Peers

_logger = logging.getLogger("hardpoint.executor.external_launcher")

MOST_AHEAD = 4096
"""Calls that a rank may be ahead of another."""


class Program(ABC):
    """One rank's part. ``fail(error)`` fails the executor. ``thread`` is set before any call."""

    thread: WorkerThread

    def __init__(
        self,
        rank: int,
        peers: Peers,
        calls: CallTable,
        codec: Codec,
        fail: Callable[[HardpointError], None],
    ) -> None:
        self.rank = rank
        self.peers = peers
        self.calls = calls
        self.codec = codec
        self.fail = fail
        self.call_name = ""
        """What the worker is at."""

    @abstractmethod
    def call(self, call: Call) -> None:
        """Have ``call`` run by all workers; called by the executor. Raises EncodingError."""

    @abstractmethod
    def serve(self, host: WorkerHost, call: PackedCall) -> None:
        """Have this rank's worker run one call; on its thread."""

    @abstractmethod
    def heard(self, rank: int, frame: Frame) -> None:
        """Take a frame of another rank; on the peers' thread."""

    def left(self, rank: int, reason: str) -> None:
        """Another rank ended its part, of its own accord (``reason`` is empty) or because it
        failed.
        """
        waiting = [
            gather.call.name for gather in list(self.calls.calls.values()) if rank in gather.silent
        ]
        if reason:
            self.fail(ExecutorFailedError(f"{self._named(rank)} gave up: {reason}"))
        elif waiting:
            self.fail(self._absent(rank, waiting[0]))

    def _named(self, rank: int) -> str:
        return f"rank {rank} (pid {self.peers.lines[rank].pid})"

    def _absent(self, rank: int, method: str) -> ExecutorFailedError:
        return ExecutorFailedError(
            f"{self._named(rank)} shut its engine down, and {method!r} needs every rank"
        )

    def _handled(self, host: WorkerHost, call: PackedCall) -> Frame:
        self.call_name = call.name
        return answer(self.codec, host.handle(call, carried=True))


class SameProgram(Program):
    """Every rank makes every call itself, and tells the others what its worker answered.

    Before that it tells them of the call, so that ranks which are no longer at the same find out,
    even where their workers wait for each other for ever.
    """

    def __init__(self, *parts: object, compare_plans: int = 1) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._compare = compare_plans
        self._lock = threading.Lock()
        self._made = 0
        self._steps = 0
        self._early: dict[int, list[tuple[int, Frame]]] = {}
        self._told: dict[int, dict[int, Mapping[str, str]]] = {}

    def call(self, call: Call) -> None:
        """Tell the others of it, compare, and give it to the own worker."""
        for rank, line in self.peers.lines.items():
            if line.left is not None:
                raise self._absent(rank, call.name)
        packed = call.pack(self.codec)
        own = self._digests(call)
        note = Frame(Kind.NOTE, call.call_id, call.generation, [json.dumps(own).encode()])
        self.peers.tell(note)
        self.thread.submit(packed)
        with self._lock:
            self._made = max(self._made, call.call_id)
            early = self._early.pop(call.call_id, [])
        self._compare_with(call.call_id, self.rank, own)
        for rank, frame in early:
            acknowledge(self.calls, self.codec, rank, frame)

    def serve(self, host: WorkerHost, call: PackedCall) -> None:
        """Run it whatever its caller wants by now: the other ranks run it, too."""
        self.calls.begin(call.call_id)
        frame = self._handled(host, call)
        self.peers.tell(frame)
        acknowledge(self.calls, self.codec, self.rank, frame)

    def heard(self, rank: int, frame: Frame) -> None:
        """Take another rank's note or answer; one to a call that is still to be made here waits."""
        if frame.kind == Kind.NOTE:
            self._compare_with(frame.call_id, rank, json.loads(frame.text))
        elif frame.kind in ANSWERS:
            with self._lock:
                ahead = frame.call_id > self._made and frame.call_id not in self.calls.calls
                if ahead:
                    self._early.setdefault(frame.call_id, []).append((rank, frame))
            if not ahead:
                acknowledge(self.calls, self.codec, rank, frame)

    def _digests(self, call: Call) -> dict[str, str]:
        if call.method != "execute_model":
            return {"method": call.name}
        self._steps += 1
        if not self._compare or (self._steps - 1) % self._compare:
            return {"method": call.name}
        return digests(call.name, call.args)

    def _compare_with(self, call_id: int, rank: int, found: Mapping[str, str]) -> None:
        """Compare what ``rank`` told of a call with what others did; fail by what differs."""
        with self._lock:
            told = self._told.setdefault(call_id, {})
            told[rank] = found
            others = dict(told)
            if len(told) > len(self.peers.lines):
                del self._told[call_id]
        try:
            check_digests(call_id, others)
        except HardpointError as error:
            self.fail(error)


class LeaderProgram(Program):
    """Rank 0 alone makes calls; the others carry them out and answer to it."""

    def call(self, call: Call) -> None:
        """Send it to all, and give it to the own worker."""
        for rank, line in self.peers.lines.items():
            if line.left is not None:
                raise self._absent(rank, call.name)
        packed = call.pack(self.codec)
        self.peers.tell(call_frame(self.codec, call))
        self.thread.submit(packed)

    def serve(self, host: WorkerHost, call: PackedCall) -> None:
        """Run it, unless it was taken back."""
        if call.queued and not self.begin(call.call_id):
            skipped = Reply(call_id=call.call_id, rank=self.rank, generation=call.generation)
            self.calls.deliver(skipped)
            return
        self.call_name = call.name
        self.calls.begin(call.call_id)
        self.calls.deliver(host.handle(call))

    begin: Callable[[int], bool]

    def heard(self, rank: int, frame: Frame) -> None:
        """Take an answer."""
        if frame.kind in ANSWERS:
            acknowledge(self.calls, self.codec, rank, frame)


class FollowerProgram(Program):
    """Carries out the calls of rank 0 until that ends."""

    begin: Callable[[int], bool]

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.ended = threading.Event()

    def call(self, call: Call) -> None:
        """Refuse: rank 0 decides."""
        raise ExecutorFailedError(
            f"{call.name!r} was called on rank {self.rank}; with driver_only = true rank 0 alone "
            "makes calls"
        )

    def serve(self, host: WorkerHost, call: PackedCall) -> None:
        """Run it, unless it was taken back, and answer to rank 0."""
        if call.queued and not self.begin(call.call_id):
            self.peers.send(0, Frame(Kind.NOTHING, call.call_id, call.generation))
            return
        self.peers.send(0, self._handled(host, call))

    def heard(self, rank: int, frame: Frame) -> None:
        """Take a call."""
        if rank == 0 and frame.kind == Kind.CALL:
            self.thread.submit(called(self.codec, frame))

    def left(self, rank: int, reason: str) -> None:
        """Rank 0 has ended: so does this one. Another one's end is rank 0's to judge."""
        if rank != 0:
            return
        if reason:
            self.fail(ExecutorFailedError(f"{self._named(rank)} gave up: {reason}"))
        self.ended.set()


def call_frame(codec: Codec, call: Call) -> Frame:
    """Return a call as it travels. Raises EncodingError."""
    data, buffers = codec.encode_call(call)
    head = {"name": call.name, "reply_rank": call.reply_rank, "queued": call.queued}
    parts = [json.dumps(head).encode(), data, *buffers]
    return Frame(Kind.CALL, call.call_id, call.generation, parts)


def called(codec: Codec, frame: Frame) -> PackedCall:
    """Return the call in a frame."""
    from hardpoint.rpc.calls import PackedCall

    head = json.loads(frame.text)
    buffers = [memoryview(part) for part in frame.parts[2:]]
    return PackedCall(
        call_id=frame.call_id,
        generation=frame.generation,
        name=head["name"],
        body=codec.parcel(frame.parts[1], buffers),
        reply_rank=head["reply_rank"],
        queued=head["queued"],
    )
