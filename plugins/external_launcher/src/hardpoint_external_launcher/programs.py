"""What the ranks do together: all run one program, or rank 0 has the others carry out its calls."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from attrs import evolve
from hardpoint.errors import ExecutorFailedError, HardpointError
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.v0.worker_loop import LOOP

from hardpoint_external_launcher.agreement import check_digests, digests, outcome
from hardpoint_external_launcher.answers import ANSWERS, acknowledge, answer
from hardpoint_external_launcher.frames import Frame, Kind

if TYPE_CHECKING:
    from hardpoint.rpc.calls import Call, CallTable
    from hardpoint.rpc.encoding import Codec
    from hardpoint.rpc.host import WorkerHost
    from hardpoint.rpc.worker_thread import WorkerThread

    from hardpoint_external_launcher.peers import Peers

_logger = logging.getLogger("hardpoint.executor.external_launcher")

LEAVE_SECONDS = 1.0
"""For how long a call that another rank left before it answered may still end by an error."""

KEPT = 64
"""Calls for which it is kept what workers chose, where not all ranks' do."""

LOOPED = frozenset({"execute_model", "sample_tokens"})
"""Calls that the resident loop takes."""


class Program(ABC):
    """One rank's part. ``fail(error)`` fails the executor. ``thread`` is set before any call.

    ``codec`` is that of what the ranks tell each other, ``own`` that of what stays in this process.
    """

    thread: WorkerThread

    def __init__(
        self,
        rank: int,
        peers: Peers,
        calls: CallTable,
        codec: Codec,
        own: Codec,
        fail: Callable[[HardpointError], None],
    ) -> None:
        self.rank = rank
        self.peers = peers
        self.calls = calls
        self.codec, self.own = codec, own
        self.fail = fail
        self._timer: threading.Timer | None = None
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
        if reason:
            self.fail(ExecutorFailedError(f"{self._named(rank)} gave up: {reason}"))
        elif self._waiting_for(rank):
            # It may have heard first what this rank's own worker is just about to say here.
            self._timer = threading.Timer(LEAVE_SECONDS, self._missed, (rank,))
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Serve no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _answered(self, rank: int, frame: Frame) -> None:
        """Take an answer. A failure that comes after its rank has left is of its leaving: what
        ended its worker's work is no error of the call.
        """
        if frame.kind == Kind.FAILURE and self.peers.lines[rank].left is not None:
            self._missed(rank)
        else:
            acknowledge(self.calls, self.codec, rank, frame)

    def _waiting_for(self, rank: int) -> list[str]:
        return [
            gather.call.name for gather in list(self.calls.calls.values()) if rank in gather.silent
        ]

    def _missed(self, rank: int) -> None:
        for name in self._waiting_for(rank)[:1]:
            self.fail(self._absent(rank, name))

    def _named(self, rank: int) -> str:
        return f"rank {rank} (pid {self.peers.lines[rank].pid})"

    def _absent(self, rank: int, method: str) -> ExecutorFailedError:
        return ExecutorFailedError(
            f"{self._named(rank)} shut its engine down, and {method!r} needs every rank"
        )


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
        self._told: dict[tuple[Kind, int], dict[int, Mapping[str, str]]] = {}
        self._compared = False

    def call(self, call: Call) -> None:
        """Tell the others of it, compare, and give it to the own worker."""
        for rank, line in self.peers.lines.items():
            if line.left is not None:
                raise self._absent(rank, call.name)
        packed = call.pack(self.own)
        own = self._digests(call)
        note = Frame(Kind.NOTE, call.call_id, call.generation, [json.dumps(own).encode()])
        self.peers.tell(note)
        self.thread.submit(packed)
        with self._lock:
            self._made = max(self._made, call.call_id)
            early = self._early.pop(call.call_id, [])
        self._compare_with(Kind.NOTE, call.call_id, self.rank, own)
        for rank, frame in early:
            self._answered(rank, frame)

    def serve(self, host: WorkerHost, call: PackedCall) -> None:
        """Run it, whatever its caller wants by now, if other ranks do, too; with none, a call that
        was cancelled is dropped.
        """
        wanted = self.calls.begin(call.call_id)
        if not wanted and not self.peers.lines:
            return
        self.call_name = call.name
        if call.name in LOOPED and self._compare:
            reply = self._chosen(host, call)
        else:
            reply = host.handle(call, carried=True)
        frame = answer(self.codec, reply)
        self.peers.tell(frame)
        acknowledge(self.calls, self.codec, self.rank, frame)

    def _chosen(self, host: WorkerHost, call: PackedCall) -> Reply:
        """Run a step, and tell what this rank's worker chose, though another's is the answer: a
        worker that chose otherwise computes something else from now on.
        """
        reply = host.handle(evolve(call, reply_rank=None), carried=True)
        own = outcome(call.name, reply.value)
        if own:
            said = Frame(Kind.OUTCOME, call.call_id, call.generation, [json.dumps(own).encode()])
            self.peers.tell(said)
            self._compare_with(Kind.OUTCOME, call.call_id, self.rank, own)
        if call.reply_rank in (None, self.rank):
            return reply
        return evolve(reply, value=None, of="")

    def heard(self, rank: int, frame: Frame) -> None:
        """Take another rank's note or answer; one to a call that is still to be made here waits."""
        if frame.kind in (Kind.NOTE, Kind.OUTCOME):
            self._compare_with(Kind(frame.kind), frame.call_id, rank, json.loads(frame.text))
        elif frame.kind in ANSWERS:
            with self._lock:
                ahead = frame.call_id > self._made and frame.call_id not in self.calls.calls
                if ahead:
                    self._early.setdefault(frame.call_id, []).append((rank, frame))
            if not ahead:
                self._answered(rank, frame)

    def _digests(self, call: Call) -> dict[str, str]:
        if call.method == "execute_model":
            self._compared = bool(self._compare) and self._steps % self._compare == 0
            self._steps += 1
        if call.method not in LOOPED or not self._compared:
            return {"method": call.name}
        return digests(call.name, call.args)

    def _compare_with(self, kind: Kind, call_id: int, rank: int, found: Mapping[str, str]) -> None:
        """Compare what ``rank`` told of a call with what others did; fail by what differs. Of what
        workers chose those tell that have it: of stages the last one's.
        """
        with self._lock:
            told = self._told.setdefault((kind, call_id), {})
            told[rank] = found
            others = dict(told)
            if len(told) > len(self.peers.lines):
                del self._told[kind, call_id]
            self._told.pop((Kind.OUTCOME, call_id - KEPT), None)  # of stages not all tell
        try:
            check_digests(call_id, others)
        except HardpointError as error:
            self.fail(error)


class LeaderProgram(Program):
    """Rank 0 alone makes calls; the others carry them out and answer to it."""

    begin: Callable[[int], bool]
    looping = False
    """Whether the others are in the resident loop."""

    def call(self, call: Call) -> None:
        """Send it to all, and give it to the own worker."""
        kind = Kind.STEP if self.looping and call.method in LOOPED else Kind.CALL
        self._send(call, range(len(self.peers.lines) + 1), kind)

    def call_ranks(self, call: Call, ranks: Sequence[int]) -> None:
        """Have the workers of ``ranks`` run it; the others' answers are nothing. The call by which
        workers begin to loop makes what follows go to their loop.
        """
        self._send(call, ranks, Kind.CALL)
        self.looping = self.looping or call.method == LOOP

    def end_loop(self) -> None:
        """Have the others leave the resident loop after what was sent to it."""
        self.looping = False
        self.peers.tell(Frame(Kind.END_LOOP))

    def _send(self, call: Call, ranks: Sequence[int], kind: Kind) -> None:
        for rank, line in self.peers.lines.items():
            if line.left is not None:
                raise self._absent(rank, call.name)
        packed = call.pack(self.codec)
        frame = call_frame(self.codec, call, kind)
        nothing = Frame(Kind.NOTHING, call.call_id, call.generation)
        for rank in self.peers.lines:
            if rank in ranks:
                self.peers.send(rank, frame)
            else:
                acknowledge(self.calls, self.codec, rank, nothing)
        if self.rank in ranks:
            self.thread.submit(packed)
        else:
            acknowledge(self.calls, self.codec, self.rank, nothing)

    def serve(self, host: WorkerHost, call: PackedCall) -> None:
        """Run it, unless it was taken back."""
        if call.queued and not self.begin(call.call_id):
            skipped = Reply(call_id=call.call_id, rank=self.rank, generation=call.generation)
            self.calls.deliver(skipped)
            return
        self.call_name = call.name
        self.calls.begin(call.call_id)
        self.calls.deliver(host.handle(call))

    def heard(self, rank: int, frame: Frame) -> None:
        """Take an answer."""
        if frame.kind in ANSWERS:
            self._answered(rank, frame)


class FollowerProgram(Program):
    """Carries out the calls of rank 0 until that ends."""

    begin: Callable[[int], bool]

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.ended = threading.Event()
        self._steps: SimpleQueue[PackedCall | None] = SimpleQueue()

    def call(self, call: Call) -> None:
        """Refuse: rank 0 decides."""
        raise ExecutorFailedError(
            f"{call.name!r} was called on rank {self.rank}; with driver_only = true rank 0 alone "
            "makes calls"
        )

    def serve(self, host: WorkerHost, call: PackedCall) -> None:
        """Run it, unless it was taken back, and answer to rank 0."""
        reply = self._loop(host, call) if call.name == LOOP else self._run(host, call)
        self.peers.send(0, answer(self.codec, reply))

    def _run(self, host: WorkerHost, call: PackedCall) -> Reply:
        if call.queued and not self.begin(call.call_id):
            return Reply(call_id=call.call_id, rank=self.rank, generation=call.generation)
        self.call_name = call.name
        return host.handle(call, carried=True)

    def _loop(self, host: WorkerHost, call: PackedCall) -> Reply:
        """Run steps as they come, until there are no more; the answer has what was raised first."""
        end = Reply(call_id=call.call_id, rank=self.rank, generation=call.generation)
        while (step := self._steps.get()) is not None:
            reply = self._run(host, step)
            end.failure = end.failure or reply.failure
            self.peers.send(0, answer(self.codec, reply))
            del step, reply  # hold nothing of it while waiting
        return end

    def heard(self, rank: int, frame: Frame) -> None:
        """Take a call."""
        if rank != 0:
            return
        if frame.kind == Kind.CALL:
            self.thread.submit(called(self.codec, frame))
        elif frame.kind == Kind.STEP:
            self._steps.put(called(self.codec, frame))
        elif frame.kind == Kind.END_LOOP:
            self._steps.put(None)

    def left(self, rank: int, reason: str) -> None:
        """Rank 0 has ended: so does this one. Another one's end is rank 0's to judge."""
        if rank != 0:
            return
        if reason:
            self.fail(ExecutorFailedError(f"{self._named(rank)} gave up: {reason}"))
        self.end()

    def end(self) -> None:
        """Leave the loop, if it is in it, and serve no more."""
        super().end()
        self.ended.set()
        self._steps.put(None)


def call_frame(codec: Codec, call: Call, kind: Kind) -> Frame:
    """Return a call as it travels. Raises EncodingError."""
    data, buffers = codec.encode_call(call)
    head = {"name": call.name, "reply_rank": call.reply_rank, "queued": call.queued}
    parts = [json.dumps(head).encode(), data, *buffers]
    return Frame(kind, call.call_id, call.generation, parts)


def called(codec: Codec, frame: Frame) -> PackedCall:
    """Return the call in a frame."""
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
