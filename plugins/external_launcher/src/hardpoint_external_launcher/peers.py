"""The other ranks: one thread that hears them, beats for this one, and judges who is silent."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from attrs import evolve
from hardpoint.errors import ExecutorFailedError, HardpointError, WorkerDiedError
from hardpoint.isolation import log_error
from hardpoint.records import WorkerHealth
from hardpoint.rpc.supervision import Action, EndCollectives, Fail, Supervisor, Warn

from hardpoint_external_launcher.frames import Beat, Frame, Kind, beat
from hardpoint_external_launcher.lines import ClosedLineError, Line

_logger = logging.getLogger("hardpoint.executor.external_launcher")


class Peers:
    """The lines to all other ranks, and their thread.

    ``heard(rank, frame)`` is called on it for every frame but those about life; ``left(rank,
    reason)`` when a peer ends its part; ``health()`` and ``text()`` say what this rank is at;
    ``end_work()`` has this rank's worker leave what it does.
    """

    def __init__(
        self,
        rank: int,
        lines: Mapping[int, Line],
        supervisor: Supervisor,
        heartbeat: float,
    ) -> None:
        self.rank = rank
        self.lines = lines
        self._supervisor = supervisor
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._beats: dict[int, tuple[float, Beat]] = {}
        self._greeted: set[int] = set()
        self._ending = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hardpoint-peers", daemon=True)
        self.on_frame: Callable[[int, Frame], None] = _ignore
        self.on_left: Callable[[int, str], None] = _ignore
        self.on_fail: Callable[[HardpointError], None] = _ignore
        self.health: Callable[[], WorkerHealth | None] = _nobody
        self.text: Callable[[], str] = str
        self.end_work: Callable[[], None] = _nothing

    def start(self) -> None:
        """Begin to listen and to beat."""
        self._thread.start()

    # For the executor, any thread.

    def send(self, rank: int, frame: Frame) -> None:
        """Send to one rank; one that is gone is known of soon."""
        try:
            self.lines[rank].send(frame)
        except ClosedLineError:
            return

    def tell(self, frame: Frame) -> None:
        """Send to all."""
        for rank in self.lines:
            self.send(rank, frame)

    def ready_self(self) -> None:
        """This rank is there."""
        self._judge(lambda now: self._supervisor.ready(self.rank, now))
        for rank, line in self.lines.items():
            self._judge(partial(self._supervisor.spawned, rank, line.pid))
        self._judge(partial(self._supervisor.spawned, self.rank, os.getpid()))

    @property
    def silent(self) -> list[int]:
        """Ranks that have not greeted."""
        return [rank for rank in self.lines if rank not in self._greeted]

    @property
    def all_greeted(self) -> bool:
        """Whether every other rank has opened its line to this one."""
        return not self.silent

    def erred(self, rank: int, call_id: int, error: BaseException) -> None:
        """Note that a rank answered a call with an error."""
        if isinstance(error, HardpointError):
            self._judge(lambda now: self._supervisor.erred(rank, call_id, error, now))
            self._ring()

    def closing(self) -> None:
        """What ends from now on, ends rightly."""
        with self._lock:
            self._supervisor.closing()

    def beats_since(self, moment: float) -> dict[int, WorkerHealth]:
        """Return what those ranks told that were heard after ``moment`` (monotonic s), and the last
        words of those that ended their part rightly.
        """
        left = {rank for rank, line in self.lines.items() if line.left == ""}
        return {
            rank: WorkerHealth(rank=rank, step_id=told.step_id, busy_since=told.busy_since)
            for rank, (when, told) in list(self._beats.items())
            if when > moment or rank in left
        }

    def ask(self) -> None:
        """Have everybody beat at once."""
        self._beat()
        for line in self.lines.values():
            try:
                line.send(Frame(Kind.PING), patient=False)
            except ClosedLineError:
                continue

    def close(self) -> None:
        """End the thread and close the lines. Idempotent."""
        self._ending = True
        for line in self.lines.values():
            line.stop()
        self._ring()
        if self._thread.ident is None:
            self._give_back()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._bell, select.POLLIN)
            places: dict[int, tuple[Line, bool]] = {}
            for line in self.lines.values():
                places |= {fd: (line, life) for fd, life in line.watch(poll).items()}
            due = time.monotonic()
            while not self._ending:
                now = time.monotonic()
                if now >= due:
                    due = now + self._heartbeat
                    self._beat()
                next_look = min(due, self._next_tick())
                wait = math.ceil(min(max(0.0, next_look - now), 60.0) * 1000)
                for fd, _ in poll.poll(wait):
                    if fd == self._bell:
                        os.eventfd_read(fd)
                        continue
                    if fd not in places:  # of a line that ended a moment ago, in this same turn
                        continue
                    line, life = places[fd]
                    if not self._hear(line, drain=life):
                        for each in [f for f, (other, _) in places.items() if other is line]:
                            poll.unregister(each)
                            del places[each]
                self._judge(self._supervisor.tick)
        except BaseException as error:  # noqa: BLE001 - nobody else would notice
            log_error(_logger, "hearing the other ranks raised", error)
            self.on_fail(ExecutorFailedError(f"hearing the other ranks raised {error!r}"))
        finally:
            self._give_back()

    def _hear(self, line: Line, *, drain: bool) -> bool:
        """Take what a line has; False once there is no more to come. ``drain``: its process ended,
        so what it sent before is all that there is.
        """
        while True:
            frames, more = line.receive()
            if frames:
                now = time.monotonic()
                with self._lock:
                    self._supervisor.heard(line.rank, now)
            for frame in frames:
                self._take(line, frame)
            if not more or (drain and not frames):
                break
            if not drain:
                return True
        if line.left is None and line.host:
            line.left = "its connection ended"
            lost = WorkerDiedError(rank=line.rank, pid=line.pid, exit=None, host=line.host)
            lost.add_note("its connection ended: by the process, its host, or the network")
            self._judge(lambda now: self._supervisor.failed(lost, now))
        elif line.left is None:
            line.left = "its process ended"
            self._judge(lambda now: self._supervisor.exited(line.rank, None, now))
        return False

    def _by_own_clock(self, line: Line, told: Beat) -> Beat:
        """Return what a rank told by this host's clock; what it says again stays the same."""
        if not line.host or told.busy_since is None:
            return told
        if line.busy[0] != told.busy_since:
            line.busy = told.busy_since, told.busy_since + time.monotonic() - told.clock
        return evolve(told, busy_since=line.busy[1])

    def _take(self, line: Line, frame: Frame) -> None:
        try:
            if frame.kind == Kind.BEAT:
                now, told = time.monotonic(), self._by_own_clock(line, Beat.of(frame))
                self._beats[line.rank] = now, told
                self._judge(
                    lambda now: self._supervisor.heard(
                        line.rank, now, busy_since=told.busy_since, call=told.text
                    )
                )
            elif frame.kind == Kind.HELLO:
                line.connected()
                self._greeted.add(line.rank)
                self._judge(lambda now: self._supervisor.ready(line.rank, now))
            elif frame.kind == Kind.PING:
                self._beat()
            elif frame.kind == Kind.LEAVE:
                line.left = frame.text
                self.on_left(line.rank, frame.text)
            else:
                self.on_frame(line.rank, frame)
        except BaseException as error:  # noqa: BLE001 - the thread must go on
            log_error(_logger, f"what rank {line.rank} sent could not be used", error)

    def _beat(self) -> None:
        health = self.health()
        busy = health is not None and health.busy_since is not None
        text = self.text() if busy else ""
        now = time.monotonic()
        own = beat(health, text)
        self._beats[self.rank] = now, Beat.of(own)
        self._judge(
            lambda now: self._supervisor.heard(
                self.rank, now, busy_since=None if health is None else health.busy_since, call=text
            )
        )
        for line in self.lines.values():
            try:
                line.send(own, patient=False)
            except ClosedLineError:
                continue

    def _next_tick(self) -> float:
        with self._lock:
            return self._supervisor.next_tick()

    def _judge(self, look: Callable[[float], list[Action]]) -> None:
        with self._lock:
            actions = look(time.monotonic())
        for action in actions:
            if isinstance(action, Fail):
                self.on_fail(action.error)
            elif isinstance(action, EndCollectives) and self.rank in action.ranks:
                self.end_work()
            elif isinstance(action, Warn):
                _logger.warning("%s", action.text)

    def _ring(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def _give_back(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._bell)
        for line in self.lines.values():
            line.close()


def _ignore(*args: object) -> None:
    """Nobody listens yet."""


def _nobody() -> None:
    return None


def _nothing() -> None:
    return
