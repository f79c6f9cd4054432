"""What a group of worker processes is suspected of, and what is to be done about it. No I/O.

A :class:`Supervisor` is told what was seen (``spawned``, ``ready``, ``heard``, ``erred``,
``exited`` ...) with the time of each, and answers with actions in the order in which they are to be
taken. It has no clock, thread or lock: an executor's monitor thread drives it, and a simulator does
on a clock of its own. Times are seconds of the driver's monotonic clock.

Four rules. The first cause wins: after one :class:`Fail` there is no other. Silent is not dead: a
worker is given up after ``silent_after`` seconds without any sign, and its stack is asked for
first. Busy is not hung: a worker that says it is busy is warned about, and is given up only where
``hang_after`` says so; of several, those that only wait for another are told to leave first, and
who does not is the one. Time during which the driver itself stood still accuses nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from attrs import define

from hardpoint.errors import (
    ExecutorFailedError,
    HardpointError,
    StartTimeoutError,
    WorkerDiedError,
    WorkerHungError,
    WorkerSilentError,
)
from hardpoint.rpc.actions import Action, DumpStack, EndCollectives, Fail, Kill, Warn

__all__ = [
    "Action", "DumpStack", "EndCollectives", "Fail", "Kill", "Supervisor", "Warn",
]  # fmt: skip

GRACE = 1.0
"""Seconds that the other ranks have to acknowledge a call of which one rank reported an error."""

STACK_WAIT = 0.5
"""Seconds for which a stack that was asked for is awaited."""

LEAVE_WAIT = 0.5
"""Seconds that ranks have to leave what they wait for each other in, before one of them is blamed.
"""

QUIET_BEATS = 4
"""Heartbeats that a worker may miss and still count as one that answers."""

MOST_SUSPECT = 64
"""Calls with an error that are watched at once; each is dropped as soon as all acknowledged it."""


@define
class _Rank:
    """What is known of one worker."""

    pid: int = 0
    stage: str = "not started"
    ready: bool = False
    heard: float | None = None
    """When it last gave a sign of life; None until its first one."""
    busy_since: float | None = None
    call: str = ""
    warned: float | None = None
    """The ``busy_since`` that was warned about."""
    accused: str = ""
    """Why its stack was asked for: ``silent`` or ``hung``."""
    last: bool = False
    """Whether that is the last thing it may do."""
    dump_until: float | None = None
    """Until when the stack that was asked for is awaited."""
    gone: bool = False


@define
class _Suspect:
    """A call of which some rank reported an error, and until when the others may acknowledge it."""

    error: HardpointError
    until: float


@define
class _Leaving:
    """Busy ranks that were told to leave what they await of each other: rank -> busy since when."""

    since: dict[int, float]
    until: float


class Supervisor:
    """Judges one generation of workers.

    ``missing(call_id)`` returns the ranks that have not acknowledged a call (CallTable.missing).
    ``heartbeat`` is the seconds between two signs of life, ``silent_after`` how long none may come;
    ``start_timeout`` how long no worker may make progress while some is not ready, ``start_key``
    the configuration key that says so; ``warn_after`` after how many busy seconds one line is
    logged; ``hang_after`` after how many a worker is given up (None: never, a call's own timeout
    bounds it). Not thread-safe: the driving executor holds a lock.
    """

    def __init__(
        self,
        world_size: int,
        now: float,
        *,
        missing: Callable[[int], Collection[int]],
        heartbeat: float,
        silent_after: float,
        start_timeout: float = 120.0,
        start_key: str = "",
        warn_after: float = 60.0,
        hang_after: float | None = None,
        grace: float = GRACE,
    ) -> None:
        self._ranks = [_Rank() for _ in range(world_size)]
        self._missing = missing
        self._heartbeat = heartbeat
        self._silent_after = max(silent_after, 2 * heartbeat)
        self._start_timeout = start_timeout
        self._start_key = start_key
        self._warn_after = warn_after
        self._hang_after = hang_after
        self._grace = grace
        self.stack_wait = STACK_WAIT  # who is farther away may be given more
        self._progress = now
        self._suspects: dict[int, _Suspect] = {}
        self._leaving: _Leaving | None = None
        self._ending: dict[int, float] = {}
        """Rank -> until when it may leave what it was told to leave."""
        self._due = now + heartbeat
        self._closing = False
        self.failure: HardpointError | None = None
        """The first cause, once there is one."""

    # What was seen.

    def spawned(self, rank: int, pid: int, now: float) -> list[Action]:
        """Worker ``rank`` has a process."""
        self._ranks[rank].pid = pid
        return self.progressed(rank, "started", now)

    def progressed(self, rank: int, stage: str, now: float) -> list[Action]:
        """A worker on its way to ready reached ``stage``, which counts as progress of the group if
        it is new to that worker.
        """
        state = self._ranks[rank]
        if state.stage != stage:
            state.stage = stage
            self._progress = now
        return []

    def ready(self, rank: int, now: float) -> list[Action]:
        """Worker ``rank`` is built and serves calls."""
        self._ranks[rank].ready = True
        self._ranks[rank].heard = now
        return self.progressed(rank, "ready", now)

    def refused(self, rank: int, error: HardpointError, now: float) -> list[Action]:
        """Worker ``rank`` could not be built: ``error`` is what the caller shall see."""
        return self._fail(error)

    def heard(
        self,
        rank: int,
        now: float,
        *,
        busy_since: float | None = None,
        call: str = "",
        stage: str = "",
    ) -> list[Action]:
        """A sign of life came: since when the worker is busy, and with which call; while it starts,
        the stage it is in.
        """
        state = self._ranks[rank]
        state.heard = now
        if state.accused == "hung" and not state.last and busy_since != state.busy_since:
            state.accused, state.dump_until = "", None  # it moves again
        state.busy_since, state.call = busy_since, call
        until = self._ending.get(rank)
        if until is not None and (busy_since is None or busy_since > until - self._grace):
            del self._ending[rank]  # it left, and may live on
        if stage and not state.ready:
            return self.progressed(rank, stage, now)
        return []

    def erred(self, rank: int, call_id: int, error: HardpointError, now: float) -> list[Action]:
        """Worker ``rank`` acknowledged ``call_id`` with an error, of which the caller was told."""
        if self.failure is not None or self._closing:
            return []
        known = self._suspects.get(call_id)
        if known is not None:
            if known.error.consequence and not error.consequence:
                known.error = error
        elif len(self._suspects) < MOST_SUSPECT:
            self._suspects[call_id] = _Suspect(error=error, until=now + self._grace)
        return []

    def exited(
        self,
        rank: int,
        exit: int | None,
        now: float,
        last_lines: Iterable[str] = (),
        cause: BaseException | None = None,
    ) -> list[Action]:
        """The process of ``rank`` ended, by exit code or negative signal; ``cause`` is what the one
        who started it says of that.
        """
        state = self._ranks[rank]
        if state.gone:
            return []
        state.gone = True
        if state.last and state.dump_until is not None:
            return self._give_up(rank, "", now)  # it ended of being asked for its stack
        pid = state.pid
        error = WorkerDiedError(rank=rank, pid=pid, exit=exit, last_lines=last_lines, cause=cause)
        return self._fail(error)

    def failed(self, error: HardpointError, now: float) -> list[Action]:
        """Something that all workers need is gone (the nursery, the channel)."""
        return self._fail(error)

    def stack(self, rank: int, text: str, now: float) -> list[Action]:
        """The stack of ``rank`` is here; empty if it could not be had."""
        state = self._ranks[rank]
        if state.dump_until is None:
            return []
        return self._give_up(rank, text, now)

    def closing(self) -> None:
        """The group is being shut down on purpose: what ends from now on, ends rightly."""
        self._closing = True
        self._acquit()

    # What follows from the time.

    def tick(self, now: float) -> list[Action]:
        """Judge what the time alone tells. Call at :meth:`next_tick`, after everything that was
        seen until ``now`` has been told.
        """
        self._forgive(now)
        self._due = now + self._heartbeat
        actions: list[Action] = self._stragglers(now)
        if self._closing or self.failure is not None:
            return actions
        actions += self._starting(now)
        actions += self._acknowledging(now)
        if self.failure is None and self._hang_after is not None:
            actions += self._hanging(self._hang_after, now)
        for rank, state in enumerate(self._ranks):
            if self.failure is None and not state.gone:
                actions += self._watch(rank, state, now)
        return actions

    def next_tick(self) -> float:
        """When to call :meth:`tick` again at the latest."""
        marks = [self._due]
        marks += (suspect.until for suspect in self._suspects.values())
        marks += (state.dump_until for state in self._ranks if state.dump_until is not None)
        marks += self._ending.values()
        marks += [] if self._leaving is None else [self._leaving.until]
        return min(marks)

    # How it is judged.

    def _forgive(self, now: float) -> None:
        """Where the driver itself stood still, its workers' silence over that time is no sign."""
        late = now - self._due - self._silent_after / 2
        if late <= 0:
            return
        self._progress += late
        for state in self._ranks:
            if state.heard is not None:
                state.heard = min(now, state.heard + late)

    def _starting(self, now: float) -> list[Action]:
        waiting = [rank for rank, state in enumerate(self._ranks) if not state.ready]
        if not waiting or now - self._progress < self._start_timeout:
            return []
        stages = {rank: self._ranks[rank].stage for rank in waiting}
        late = now - self._progress
        return self._fail(StartTimeoutError(seconds=late, stages=stages, key=self._start_key))

    def _acknowledging(self, now: float) -> list[Action]:
        for call_id, suspect in list(self._suspects.items()):
            missing = sorted(self._missing(call_id))
            if not missing:
                del self._suspects[call_id]
            elif now >= suspect.until:
                return self._abandon(suspect, missing, now)
        return []

    def _abandon(self, suspect: _Suspect, missing: list[int], now: float) -> list[Action]:
        error = ExecutorFailedError(
            f"{suspect.error}; ranks {missing} had not acknowledged the call {self._grace:g} s "
            "later, so the group was given up"
        )
        error.__cause__ = suspect.error
        self._ending = dict.fromkeys(missing, now + self._grace)
        return self._fail(error)

    def _stragglers(self, now: float) -> list[Action]:
        """Kill the ranks that were told to leave their collectives and still hang."""
        late = [rank for rank, until in self._ending.items() if now >= until]
        actions: list[Action] = []
        for rank in late:
            del self._ending[rank]
            if not self._ranks[rank].gone:
                actions.append(Kill(rank=rank))
        return actions

    def _watch(self, rank: int, state: _Rank, now: float) -> list[Action]:
        if state.dump_until is not None:
            return self._give_up(rank, "", now) if now >= state.dump_until else []
        if state.heard is not None and now - state.heard > self._silent_after:
            return self._accuse("silent", rank, now)
        if state.busy_since is None:
            return []
        busy = now - state.busy_since
        if busy > self._warn_after and state.warned != state.busy_since:
            state.warned = state.busy_since
            return [
                Warn(
                    text=f"worker rank {rank} (pid {state.pid}) has been busy with "
                    f"{state.call or 'a call'} for {busy:.0f} s; it still answers"
                )
            ]
        return []

    def _hanging(self, longest: float, now: float) -> list[Action]:
        busy = {
            rank: state.busy_since
            for rank, state in enumerate(self._ranks)
            if state.busy_since is not None and not state.gone
        }
        if self._leaving is None:
            over = [rank for rank, since in busy.items() if now - since > longest]
            if not over or any(state.dump_until is not None for state in self._ranks):
                return []
            if len(busy) == 1:
                return self._accuse("hung", over[0], now)
            self._leaving = _Leaving(since=busy, until=now + LEAVE_WAIT)
            return [EndCollectives(ranks=tuple(busy))]
        if now < self._leaving.until:
            return []
        left, self._leaving = self._leaving, None
        still = [rank for rank, since in left.since.items() if busy.get(rank) == since]
        if still:
            return self._accuse("hung", still[0], now)
        return self._fail(
            ExecutorFailedError(
                f"ranks {list(left.since)} waited for each other for more than {longest:g} s, "
                "longer than is allowed"
            )
        )

    def _accuse(self, of: str, rank: int, now: float) -> list[Action]:
        state = self._ranks[rank]
        state.accused = of
        state.dump_until = now + self.stack_wait
        heard = now if state.heard is None else state.heard
        # Too long in a call and quiet: it is stopped, and must not go on when it is continued.
        state.last = of == "silent" or now - heard > QUIET_BEATS * self._heartbeat
        return [DumpStack(rank=rank, last=state.last)]

    def _give_up(self, rank: int, stack: str, now: float) -> list[Action]:
        state = self._ranks[rank]
        state.dump_until = None
        if state.accused == "silent":
            silent = now - (now if state.heard is None else state.heard)
            return [
                *self._fail(
                    WorkerSilentError(rank=rank, pid=state.pid, seconds=silent, stack=stack)
                ),
                Kill(rank=rank),
            ]
        busy = now - (now if state.busy_since is None else state.busy_since)
        actions = self._fail(
            WorkerHungError(rank=rank, pid=state.pid, call=state.call, seconds=busy, stack=stack)
        )
        if state.last:
            return [*actions, Kill(rank=rank)]
        self._ending[rank] = now + self._grace  # it is told to leave; if it does not, it is killed
        return actions

    def _acquit(self) -> None:
        """Watch no call and await no stack any more."""
        self._suspects.clear()
        self._leaving = None
        for state in self._ranks:
            state.dump_until = None

    def _fail(self, error: HardpointError) -> list[Action]:
        if self.failure is not None or self._closing:
            return []
        self.failure = error
        self._acquit()
        left = tuple(rank for rank, state in enumerate(self._ranks) if not state.gone)
        told: list[Action] = [EndCollectives(ranks=left, work=True)] if left else []
        return [Fail(error=error), *told]  # in this order: what ends of it comes after its cause
