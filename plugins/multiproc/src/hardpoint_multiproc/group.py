"""The workers of one executor: started together, watched on one thread, ended together.

:class:`WorkerGroup` knows nothing of the executor but two functions, so that an executor nobody
holds can be collected while its workers run; it is what the finalizer then releases.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from attrs import define, field
from hardpoint.errors import (
    ExecutorFailedError,
    HardpointError,
    StartTimeoutError,
    WorkerDiedError,
    WorkerSilentError,
)
from hardpoint.records import WorkerHealth
from hardpoint.rpc.control import ControlLane, Order, Report, Sign
from hardpoint.rpc.process_life import is_stopped
from hardpoint.rpc.supervision import (
    Action,
    DumpStack,
    EndCollectives,
    Fail,
    Kill,
    Supervisor,
    Warn,
)

from hardpoint_multiproc import descriptors
from hardpoint_multiproc.launching import Launch
from hardpoint_multiproc.limits import refused
from hardpoint_multiproc.loading_watch import LoadingWatch
from hardpoint_multiproc.loop import left_until
from hardpoint_multiproc.nursery_process import NurseryProcess, end_group, how_ended
from hardpoint_multiproc.settings import START_TIMEOUT
from hardpoint_multiproc.shutdown_time import shares
from hardpoint_multiproc.signals import LAST_STACK_SIGNAL, STACK_SIGNAL
from hardpoint_multiproc.start_choice import PLAIN

_logger = logging.getLogger("hardpoint.executor.mp")

STACK_SECONDS = 0.02
"""A stack that does not grow for so long is complete."""

EXIT_SECONDS = 0.3
"""How long the nursery's word on a dead worker's exit is awaited."""

LEFT_SECONDS = 0.5
"""How long the end of a process that closed its control lane is awaited: it comes in a moment."""


@define(eq=False)
class _Worker:
    """One worker as the driver knows it. Written by the loop's thread."""

    launch: Launch
    lane: ControlLane
    pid: int = 0
    host: str = ""
    """Where it is, if not on this host."""
    pidfd: int = -1
    gone: bool = False
    exit: int | None = None
    cause: BaseException | None = None
    """What the one who started it says of its end."""
    exit_until: float = math.inf
    """Until when its exit status is awaited."""
    left_until: float = math.inf
    """Until when the end of a process is awaited that has closed its control lane."""
    stack_from: int = -1
    """Where in the memory of stacks the one that was asked for begins; -1: none was."""
    stack_size: int = 0
    pong: int = 0
    health: WorkerHealth | None = None
    heard: float = 0.0
    ended: threading.Event = field(factory=threading.Event)


class WorkerGroup:
    """Starts, watches and ends the workers of one generation.

    ``supervisor`` judges what is seen. ``fail(error)`` is called once, on a thread of its own, when
    the group has failed. ``command`` is that of a plain interpreter; ``may_change`` says whether a
    worker that cannot be forked may be started plain instead. ``start_timeout`` is for how many
    seconds no worker may come further while they take devices and load, ``start_key`` the key that
    says so; ``exit_seconds`` for how many the word on a dead worker's exit is awaited.
    """

    def __init__(
        self,
        nursery: NurseryProcess,
        supervisor: Supervisor,
        fail: Callable[[HardpointError], None],
        *,
        command: Sequence[str],
        may_change: bool,
        start_timeout: float,
        tidy: Callable[[], None],
        start_key: str = START_TIMEOUT,
        exit_seconds: float = EXIT_SECONDS,
    ) -> None:
        self._nursery = nursery
        self._tidy = tidy
        self._supervisor = supervisor
        self._fail = fail
        self._command = list(command)
        self._may_change = may_change
        self._loading = LoadingWatch(start_timeout)
        self._start_key = start_key
        self._exit_seconds = exit_seconds
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._workers: list[_Worker] = []
        self._pings = 0
        self._closing = False
        nursery.listen(self._heard, self._nursery_died)

    # Start.

    def start(self, launches: Iterable[Launch], way: str) -> None:
        """Have the nursery start every worker; return at once. What becomes of them is seen on the
        loop's thread.
        """
        self._workers = [
            _Worker(launch=launch, lane=launch.lane) for launch in launches if launch.lane
        ]
        self._nursery.loop.ask(self._tick)
        for worker in self._workers:
            self._launch(worker, way)

    def _launch(self, worker: _Worker, way: str) -> None:
        launch = worker.launch
        op = {"op": "start", "rank": launch.rank, "way": way, "command": self._command}
        self._nursery.tell(op, launch.given)

    def _heard(self, message: dict[str, object], fds: list[int]) -> None:
        rank = message["rank"]
        if not isinstance(rank, int):
            raise TypeError(f"a nursery speaks of rank {rank!r}")
        worker, now = self._workers[rank], time.monotonic()
        if message["op"] == "started" and "refused" in message:  # its pidfd was one too many
            error = refused(OSError(errno.EMFILE, message["refused"]))
            self._judge(lambda judge: judge.refused(rank, error, now))
        elif message["op"] == "started":
            worker.host = str(message.get("host") or "")
            self._started(worker, int(str(message["pid"])), fds[0] if fds else -1, now)
        elif message["op"] == "exited":
            code, cause = message["exit"], message.get("cause")
            worker.exit = None if code is None else int(str(code))
            worker.cause = cause if isinstance(cause, BaseException) else None
            self._ended(worker)
        elif message["op"] == "stack":  # of a worker on another host
            text = str(message["text"])
            self._judge(lambda judge: judge.stack(rank, text, now))
        elif message["op"] == "refused" and self._may_change:
            _logger.warning(
                "worker rank %d is started plain: the nursery cannot be forked, %s",
                rank, message["reason"],
            )  # fmt: skip
            self._launch(worker, PLAIN)
        else:
            error = ExecutorFailedError(
                f"the process of worker rank {rank} could not be started: {message['reason']}"
            )
            self._judge(lambda judge: judge.refused(rank, error, now))

    def _started(self, worker: _Worker, pid: int, pidfd: int, now: float) -> None:
        worker.pid, worker.pidfd, worker.heard = pid, pidfd, now
        loop, rank = self._nursery.loop, worker.launch.rank
        self._nursery.output.rename(rank, f"{worker.launch.title} pid={pid}")
        worker.launch.hand_over()
        if pidfd >= 0:  # else it is on another host
            loop.watch(pidfd, lambda: self._dying(worker))
        loop.watch(worker.lane.fileno(), lambda: self._listen(worker))
        self._judge(lambda judge: judge.spawned(rank, pid, now))
        with self._changed:
            self._changed.notify_all()

    def await_processes(self, seconds: float) -> None:
        """Wait until every worker's process is known: what a worker answers may come before what
        its starter says. Raises what the group failed by, StartTimeoutError after ``seconds``.
        """
        if unknown := self._wait(lambda worker: not worker.pid, time.monotonic() + seconds):
            stages = {each.launch.rank: "which process it is was not told" for each in unknown}
            raise StartTimeoutError(seconds=seconds, stages=stages, key=self._start_key)

    # What is seen.

    def _listen(self, worker: _Worker) -> None:
        reports, open_ = worker.lane.reports()
        if not open_:
            self._nursery.loop.forget(worker.lane.fileno())
            worker.left_until = time.monotonic() + LEFT_SECONDS
        for report in reports:
            self._report(worker, report, time.monotonic())

    def _report(self, worker: _Worker, report: Report, now: float) -> None:
        rank = worker.launch.rank
        worker.heard = now
        worker.health = WorkerHealth(
            rank=rank, step_id=report.step_id, busy_since=report.busy_since
        )
        stage = report.text if report.sign is Sign.STAGE else ""
        self._loading.heard(rank, report.text if report.busy_since else "", report.work, now)
        self._judge(
            lambda judge: judge.heard(
                rank, now, busy_since=report.busy_since, call=report.text, stage=stage
            )
        )
        if stage == "ready":
            self._judge(lambda judge: judge.ready(rank, now))
        if report.sign is Sign.PONG:
            with self._changed:
                worker.pong = max(worker.pong, report.number)
                self._changed.notify_all()

    def _dying(self, worker: _Worker) -> None:
        """The process has ended; how, the nursery tells in a moment."""
        self._nursery.loop.forget(worker.pidfd)
        worker.exit_until = time.monotonic() + self._exit_seconds

    def _left(self, worker: _Worker) -> None:
        """The process lives and is no worker any more: by ``exec`` it became something else."""
        worker.left_until = math.inf
        if worker.pidfd < 0 or worker.exit_until < math.inf or self._closing:
            return  # of another host; it has ended and how is awaited; or it may leave
        rank, now = worker.launch.rank, time.monotonic()
        if not descriptors.has_memory(worker.pid):
            worker.left_until = now + LEFT_SECONDS
            return
        lines = self._nursery.output.last_lines(rank)
        cause = ExecutorFailedError(
            f"the process of worker rank {rank} closed all that ties it to its driver and runs on, "
            "as after `exec`; it is ended"
        )
        self._judge(lambda judge: judge.exited(rank, None, now, lines, cause))
        self._signal(worker, signal.SIGKILL)

    def _ended(self, worker: _Worker) -> None:
        if worker.gone:
            return
        worker.gone, worker.exit_until, worker.left_until = True, math.inf, math.inf
        if worker.pidfd >= 0:
            self._nursery.loop.forget(worker.pidfd)
        self._listen_last(worker)
        rank, now = worker.launch.rank, time.monotonic()
        if worker.stack_from >= 0:
            self._take_stack(worker, now)
        lines = self._nursery.output.last_lines(rank)
        if worker.host:
            died = WorkerDiedError(
                rank=rank, pid=worker.pid, exit=worker.exit, last_lines=lines, host=worker.host,
                cause=worker.cause,
            )  # fmt: skip
            self.give_up(died)
        self._judge(lambda judge: judge.exited(rank, worker.exit, now, lines, worker.cause))
        worker.ended.set()

    def give_up(self, error: HardpointError) -> None:
        """Fail the group by ``error``, unless it failed or is closing. On the loop's thread."""
        now = time.monotonic()
        self._judge(lambda judge: judge.failed(error, now))

    def _listen_last(self, worker: _Worker) -> None:
        if (fd := worker.lane.fileno()) >= 0:
            self._nursery.loop.forget(fd)

    def _nursery_died(self, code: int | None) -> None:
        pid, now = self._nursery.pid, time.monotonic()
        for worker in self._workers:
            if worker.pidfd >= 0:  # a process of this host: elsewhere its number is another's
                end_group(worker.pid, os.getsid(0))
        error = ExecutorFailedError(
            f"the nursery (pid {pid}) {how_ended(code)}, and the workers, its children, with it"
        )
        self._judge(lambda judge: judge.failed(error, now))
        for worker in self._workers:
            worker.gone = True
            worker.ended.set()

    def _tick(self, now: float) -> float:
        self._tidy()
        due = math.inf
        for worker in self._workers:
            if now >= worker.exit_until:
                self._ended(worker)
            if now >= worker.left_until:
                self._left(worker)
            due = min(due, worker.exit_until, worker.left_until, self._look_for_stack(worker, now))
        with self._lock:
            next_tick = self._supervisor.next_tick()
        if now >= next_tick:
            self._judge(lambda judge: judge.tick(now))
            if stuck := self._loading.stuck(now):
                error = StartTimeoutError(
                    seconds=self._loading.since(now), stages=stuck, key=self._start_key
                )
                self._judge(lambda judge: judge.failed(error, now))
            with self._lock:
                next_tick = self._supervisor.next_tick()
        return min(due, next_tick)

    def erred(self, rank: int, call_id: int, error: BaseException) -> None:
        """A worker reported an error: from now on it is watched whether the others acknowledge that
        call too. Any thread.
        """
        if isinstance(error, HardpointError):
            now = time.monotonic()
            self._nursery.loop.call(
                lambda: self._judge(lambda judge: judge.erred(rank, call_id, error, now))
            )

    # What follows.

    def _judge(self, tell: Callable[[Supervisor], list[Action]]) -> None:
        with self._lock:
            actions = tell(self._supervisor)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        if isinstance(action, Fail):
            # Others' callbacks run there, and may shut the executor down, which waits for the loop.
            threading.Thread(
                target=self._fail, args=(action.error,), name="hardpoint-mp-failure", daemon=True
            ).start()
            with self._changed:
                self._changed.notify_all()
        elif isinstance(action, EndCollectives):
            order = Order.CANCEL if action.work else Order.END_COLLECTIVES
            for worker in self._workers:  # none, if the nursery ended before it was used
                if worker.launch.rank in action.ranks:
                    worker.lane.order(order)
        elif isinstance(action, DumpStack):
            self._ask_for_stack(self._workers[action.rank], last=action.last)
        elif isinstance(action, Kill):
            self._signal(self._workers[action.rank], signal.SIGKILL)
        elif isinstance(action, Warn):
            _logger.warning("%s", action.text)

    def _signal(self, worker: _Worker, signum: int) -> None:
        """Send a signal to a worker's process group, by the one who reaps it."""
        if worker.gone:
            return
        try:
            self._nursery.tell({"op": "signal", "rank": worker.launch.rank, "signal": int(signum)})
        except ExecutorFailedError:
            return  # it took the workers with it

    def _ask_for_stack(self, worker: _Worker, *, last: bool) -> None:
        """Have the worker write its stacks, and end then if ``last``; a stopped one is continued
        for that.
        """
        if worker.host and not worker.gone:
            op = {"op": "stack", "rank": worker.launch.rank, "last": last}
            with suppress(ExecutorFailedError):  # the nursery took the local workers with it
                self._nursery.tell(op)
        if worker.pidfd < 0 or worker.gone:
            return
        worker.stack_from = worker.stack_size = os.fstat(worker.launch.stacks).st_size
        try:
            signal.pidfd_send_signal(worker.pidfd, LAST_STACK_SIGNAL if last else STACK_SIGNAL)
            if is_stopped(worker.pid):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGCONT)
        except OSError:
            worker.stack_from = -1

    def _look_for_stack(self, worker: _Worker, now: float) -> float:
        """Take a stack that was asked for, once it grows no more; return when to look again."""
        if worker.stack_from < 0:
            return math.inf
        size = os.fstat(worker.launch.stacks).st_size
        if size > worker.stack_from and size == worker.stack_size:
            self._take_stack(worker, now)
            return math.inf
        worker.stack_size = size
        return now + STACK_SECONDS

    def _take_stack(self, worker: _Worker, now: float) -> None:
        text = descriptors.contents(worker.launch.stacks)[worker.stack_from :]
        worker.stack_from = -1
        rank = worker.launch.rank
        self._judge(lambda judge: judge.stack(rank, text.decode(errors="replace"), now))

    # Health.

    def probe(self, timeout: float) -> list[WorkerHealth]:
        """Ping every worker and return what each answers within ``timeout`` seconds.

        Raises WorkerSilentError for the first that does not, and what the group failed by.
        """
        until = time.monotonic() + timeout
        with self._changed:
            self._pings += 1
            number = self._pings
        for worker in self._workers:
            worker.lane.order(Order.PING, number)
        for silent in self._wait(lambda worker: worker.pong < number, until):
            raise WorkerSilentError(
                rank=silent.launch.rank, pid=silent.pid, seconds=time.monotonic() - silent.heard
            )
        return [worker.health for worker in self._workers if worker.health is not None]

    def _wait(self, misses: Callable[[_Worker], bool], until: float) -> list[_Worker]:
        """Wait while a worker ``misses`` something; return those that still do at ``until``. Raises
        what the group failed by.
        """
        with self._changed:
            while waiting := [each for each in self._workers if misses(each)]:
                if (failure := self._supervisor.failure) is not None:
                    raise failure
                if not self._changed.wait(left_until(until)):
                    break
            return waiting

    # End.

    def stop(self, deadline: float, ask: Callable[[], None]) -> None:
        """End every worker by ``deadline``: first they are told to leave their work and ``ask()``
        asks them to shut down; SIGTERM and SIGKILL follow for those that do not.
        """
        with self._lock:
            self._closing = True
            self._supervisor.closing()
            failed = self._supervisor.failure is not None
        if self._nursery.loop.is_current():
            return  # it cannot wait for what it would see itself; closing ends them all
        now = time.monotonic()
        term, kill = shares(now, deadline, failed=failed)
        for worker in self._workers:
            worker.lane.order(Order.CANCEL)
        ask()
        late = self._await_ends(term)
        for worker in late:
            self._signal(worker, signal.SIGTERM)
        later = self._await_ends(kill) if late else []
        for worker in later:
            self._signal(worker, signal.SIGKILL)
        if later:
            self._await_ends(max(deadline, time.monotonic() + EXIT_SECONDS))
        self._tell_of(late, later, [] if failed else self._workers)

    def _await_ends(self, until: float) -> list[_Worker]:
        """Return the workers that have a process and have not ended by ``until``."""
        running = [worker for worker in self._workers if worker.pid]
        return [worker for worker in running if not worker.ended.wait(left_until(until))]

    @staticmethod
    def _tell_of(late: list[_Worker], later: list[_Worker], others: list[_Worker]) -> None:
        """Log who did not end by itself, and which of the others ended with an error."""
        for worker in late:
            how = "SIGTERM, then SIGKILL" if worker in later else "SIGTERM"
            _logger.warning(
                "worker rank %d (pid %d) was still busy when its share of the shutdown's time was "
                "over; it was ended by %s",
                worker.launch.rank, worker.pid, how,
            )  # fmt: skip
        for worker in others:
            if worker.exit and worker not in late:
                _logger.warning(
                    "worker rank %d (pid %d) %s",
                    worker.launch.rank, worker.pid, how_ended(worker.exit),
                )  # fmt: skip

    def close(self, within: float) -> None:
        """End whatever is left, and give everything back. Idempotent."""
        self._nursery.close(within)
        if self._nursery.exit:  # it did not end by itself, and may have left groups of the dead
            for worker in self._workers:
                if worker.pidfd >= 0 and worker.exit is None:
                    end_group(worker.pid, os.getsid(0))
        for worker in self._workers:
            worker.launch.close()
            pidfd, worker.pidfd = worker.pidfd, -1
            descriptors.close([pidfd] if pidfd >= 0 else ())
        self._workers = []
