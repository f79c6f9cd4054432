"""This process's worker and its company: everything that an executor has to give back.

It knows nothing of the executor but the function that fails it, so that an executor nobody holds
can be collected while its worker waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen
from hardpoint.errors import ExecutorFailedError, HardpointError, StartTimeoutError, WorkerDiedError
from hardpoint.records import WorkerHealth
from hardpoint.rpc.claims import CallerClaims, Unclaimed, WorkerClaims
from hardpoint.rpc.supervision import Supervisor
from hardpoint.rpc.worker_thread import RELEASE_SECONDS, WorkerThread

from hardpoint_external_launcher.frames import Frame, Kind
from hardpoint_external_launcher.launchers import Seat
from hardpoint_external_launcher.lines import settle
from hardpoint_external_launcher.meeting import Company, meet
from hardpoint_external_launcher.peers import Peers
from hardpoint_external_launcher.programs import (
    FollowerProgram,
    LeaderProgram,
    Program,
    SameProgram,
)
from hardpoint_external_launcher.settings import START_TIMEOUT, ExternalLauncherSettings

if TYPE_CHECKING:
    from hardpoint.registry import Registry
    from hardpoint.rpc.calls import CallTable
    from hardpoint.rpc.deadlines import Deadlines
    from hardpoint.rpc.encoding import Codec
    from hardpoint.rpc.host import WorkerHost


@frozen(kw_only=True, eq=False)
class Plan:
    """What a group is made from. ``build(cancelled, rendezvous)`` makes the worker's host;
    ``fail(error)`` fails the executor.
    """

    seat: Seat
    settings: ExternalLauncherSettings
    identity: Mapping[str, str]
    calls: CallTable
    deadlines: Deadlines
    codec: Codec
    registry: Registry
    heartbeat: float
    silent_after: float
    build: Callable[[Callable[[], bool], str | None], WorkerHost]
    fail: Callable[[HardpointError], None]


class Group:
    """Met by :meth:`start`, ended by :meth:`stop`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.company: Company | None = None
        self.peers: Peers | None = None
        self.thread: WorkerThread | None = None
        self.program: Program | None = None
        self.failure: BaseException | None = None
        self._claims: CallerClaims | None = None
        self._leaving = False
        self._ended = False

    def start(self) -> None:
        """Meet the others, and build the worker. Raises what kept it from that, which the others
        are told.
        """
        try:
            self._start()
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _start(self) -> None:
        plan, seat = self.plan, self.plan.seat
        leads = plan.settings.driver_only and seat.rank == 0
        if leads:
            self._claims = plan.calls.claims = CallerClaims(seat.world_size)
        elif seat.world_size > 1:
            plan.calls.claims = Unclaimed()  # the other ranks make the same calls, and run them
        board = -1 if self._claims is None else os.dup(self._claims.fd)
        timeout = plan.settings.start_timeout
        self.company = company = meet(seat, plan.identity, plan.settings, board)
        if company.several_hosts and leads:
            plan.calls.claims = Unclaimed()  # there is no memory that all ranks share
        self.peers = peers = Peers(seat.rank, company.lines, self._supervisor(), plan.heartbeat)
        self.program = program = self._program(peers)
        self.thread = program.thread = thread = WorkerThread(
            partial(self._build, self._rendezvous()),
            plan.calls,
            plan.deadlines,
            self._died,
            program.serve,
            name="hardpoint-external-launcher",
        )
        peers.on_frame, peers.on_left, peers.on_fail = program.heard, program.left, self.fail
        peers.health, peers.text = thread.health, lambda: program.call_name
        peers.end_work = self._end_work
        plan.calls.erred = peers.erred
        peers.start()
        self._greet(peers, company, timeout)
        thread.start()

    def stop(self, deadline: float) -> bool:
        """Leave the others, end the worker by ``deadline`` (monotonic s), and give everything back;
        return whether the worker has ended. Idempotent.
        """
        ended = True
        if self.peers is not None and not self._leaving:
            self._leaving = True
            self.peers.closing()
            why = _why(self.failure)
            self.peers.tell(Frame(Kind.LEAVE, parts=[why.encode()]))
        if self.program is not None:
            self.program.end()
        if self.thread is not None:
            ended = self.thread.stop(deadline)
        if self.peers is not None:
            self.peers.close()
        if self.company is not None:
            self.company.close()
        if self._claims is not None:
            self._claims.close()
        return ended

    def release(self) -> None:
        """Stop for an executor that was collected, or that the interpreter's end found running."""
        plan = self.plan
        self.stop(time.monotonic() + RELEASE_SECONDS)
        plan.deadlines.close()
        plan.calls.fail_all(ExecutorFailedError("the executor was dropped without shutdown()"))

    def fail(self, error: HardpointError) -> None:
        """Remember the first failure, and fail the executor by it."""
        self.failure = self.failure or error
        self.plan.fail(error)
        self._end_work()
        if self.program is not None:
            self.program.end()

    def health(self, timeout: float) -> list[WorkerHealth]:
        """Return every rank's progress; those that do not answer in time are missing."""
        peers, world_size = self.peers, self.plan.seat.world_size
        if peers is None:
            return []
        asked = time.monotonic()
        peers.ask()
        settle(lambda: len(peers.beats_since(asked)) == world_size, asked + timeout)
        told = peers.beats_since(asked)
        return [told[rank] for rank in sorted(told)]

    # Within.

    def _program(self, peers: Peers) -> Program:
        plan, rank = self.plan, self.plan.seat.rank
        codec = plan.codec
        if self.company is not None and self.company.several_hosts:
            from hardpoint.rpc.network.hub import codec_across

            codec = codec_across(plan.registry)  # what another host says is never unpickled
        parts = (rank, peers, plan.calls, codec, plan.codec, self.fail)
        if not plan.settings.driver_only:
            return SameProgram(*parts, compare_plans=plan.settings.compare_plans)
        program = LeaderProgram(*parts) if rank == 0 else FollowerProgram(*parts)
        program.begin = _always
        if self.company is not None and self.company.board >= 0:
            claims = WorkerClaims(self.company.board, plan.seat.world_size, rank)
            program.begin = claims.begin
        return program

    def _rendezvous(self) -> str | None:
        if self.company is None or self.plan.seat.world_size == 1:
            return None
        way = "network:" if self.company.several_hosts else "file://"
        return f"{way}/proc/self/fd/{self.company.memory}"

    def _build(self, rendezvous: str | None, stopping: Callable[[], bool]) -> WorkerHost:
        return self.plan.build(lambda: stopping() or self._ended, rendezvous)

    def _supervisor(self) -> Supervisor:
        plan, settings = self.plan, self.plan.settings
        return Supervisor(
            plan.seat.world_size,
            time.monotonic(),
            missing=plan.calls.missing,
            heartbeat=plan.heartbeat,
            silent_after=plan.silent_after,
            start_timeout=settings.start_timeout,
            start_key=START_TIMEOUT,
            warn_after=settings.warn_after,
            hang_after=settings.hang_after,
        )

    def _greet(self, peers: Peers, company: Company, timeout: float) -> None:
        """Return when all have opened their lines to this rank: the store is done then."""
        peers.ready_self()
        peers.tell(Frame(Kind.HELLO))
        deadline = time.monotonic() + timeout
        settle(lambda: peers.all_greeted or self.failure is not None, deadline)
        if self.failure is not None:
            raise self.failure
        if not peers.all_greeted:
            stages = dict.fromkeys(peers.silent, "met, but silent")
            raise StartTimeoutError(seconds=timeout, stages=stages, key=START_TIMEOUT)
        company.met()

    def _end_work(self) -> None:
        """Have the own worker leave what it waits for."""
        self._ended = True
        host = None if self.thread is None else self.thread.host
        if host is not None:
            host.worker.end_collectives()

    def _died(self, error: BaseException) -> None:
        death = WorkerDiedError(rank=self.plan.seat.rank, pid=os.getpid(), exit=None)
        death.__cause__ = error
        self.fail(death)


def _why(failure: BaseException | None) -> str:
    if failure is None or isinstance(failure, HardpointError):
        return f"{failure or ''}"
    return f"{type(failure).__name__}: {failure}"


def _always(call_id: int) -> bool:
    """Whether a call still may begin where nothing is taken back."""
    return True
