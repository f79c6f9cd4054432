"""The driver's hold of its actors: what the nursery is to ``mp``, Ray is here.

:class:`Actors` starts, watches and ends the workers' processes, for a
:class:`hardpoint_multiproc.group.WorkerGroup`, which does all the rest.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import hardpoint
import ray
from attrs import define
from hardpoint.errors import ExecutorFailedError
from hardpoint_multiproc.loop import Loop
from hardpoint_multiproc.nursery_process import end_group
from hardpoint_multiproc.output import Output
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hardpoint_ray import far_stacks
from hardpoint_ray.actor import Whereabouts, WorkerActor
from hardpoint_ray.asking import Asking
from hardpoint_ray.handover import Handover
from hardpoint_ray.placement import Reservation, Seat, awaited, nodes, table
from hardpoint_ray.session import Session

END_SECONDS = 2.0
"""How long the end of a process is awaited that was killed."""


@define(eq=False)
class _Actor:
    """One actor; ``pidfd`` is -1 for a process on another node."""

    seat: Seat
    handle: Any
    where: Whereabouts
    session: int = -1
    pidfd: int = -1
    given: list[int] | None = None
    packet: Mapping[str, Any] | None = None
    over: bool = False


class Actors:
    """The actors of one group."""

    pid: int | None = None
    exit: int | None = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reservation: Reservation | None = None
        self._actors: dict[int, _Actor] = {}
        self._heard: Callable[[dict[str, Any], list[int]], None] | None = None
        self._handover = Handover(self._wanted)
        self._raylet = -1
        """The pidfd of Ray's own process of this node, with which the actors here end."""
        self._closed = False
        self.ended: list[Callable[[], None]] = []
        """Called, perhaps twice, when no actor is at work any more, before all is given back."""
        self.output = Output()
        self.loop = Loop("hardpoint-ray", self._watch)
        self.output.start()
        self.loop.start()

    def create(
        self,
        reservation: Reservation,
        needed: Mapping[str, float],
        titles: Sequence[str],
        variables: Sequence[Mapping[str, str]],
        patience: float,
        kind: type[WorkerActor] = WorkerActor,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Whereabouts]:
        """Create an actor of ``kind`` for each seat, which takes ``needed`` of its bundle; return
        where each is, in rank order. ``arguments`` are given to all of them.

        Raises PlacementError where they are not there after ``patience`` seconds (a bundle may be
        another's), ExecutorFailedError for one that cannot be created.
        """
        self._reservation = reservation
        asked = dict(needed)
        amounts: dict[str, Any] = {
            "num_cpus": asked.pop("CPU", 0),
            "num_gpus": asked.pop("GPU", 0),
            "resources": asked,
        }
        made = ray.remote(max_restarts=0, max_task_retries=0, **amounts)(kind)
        handles = []
        for seat in reservation.seats:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=reservation.group, placement_group_bundle_index=seat.bundle
            )
            options: dict[str, Any] = {"scheduling_strategy": strategy}
            if variables[seat.rank]:  # set before the interpreter starts: Ray's own way
                options["runtime_env"] = {"env_vars": dict(variables[seat.rank])}
            titled = partial(made.options(**options).remote, titles[seat.rank])
            handles.append(titled(**(arguments or {})))
        try:
            found = _whereabouts(handles, patience, needed)
        except BaseException as error:
            for handle in handles:
                ray.kill(handle)
            if not isinstance(error, RayError):
                raise
            raise ExecutorFailedError(f"Ray could not start the workers: {error}") from error
        for seat, handle, where in zip(reservation.seats, handles, found, strict=True):
            self._actors[seat.rank] = _Actor(seat=seat, handle=handle, where=where)
        for rank, where in enumerate(found):
            if where.core != hardpoint.__version__:
                raise ExecutorFailedError(
                    f"the node of rank {rank} has hardpoint {where.core}, and this driver "
                    f"{hardpoint.__version__}: install one version on all nodes"
                )
        return found

    @property
    def one_of_each_node(self) -> dict[str, Any]:
        """Ray's handle of one actor of each node, by the node's id."""
        return {each.seat.node_id: each.handle for each in self._actors.values()}

    @property
    def handles(self) -> list[Any]:
        """Ray's handles of the actors, in rank order."""
        return [self._actors[rank].handle for rank in sorted(self._actors)]

    def give(self, rank: int, packet: Mapping[str, Any]) -> None:
        """Have worker ``rank``, of another node, start with ``packet``."""
        self._actors[rank].packet = packet

    def listen(
        self, heard: Callable[[dict[str, Any], list[int]], None], died: Callable[[int | None], None]
    ) -> None:
        """Have ``heard(message, descriptors)`` called for what becomes of workers, on the loop's
        thread. Ray outlives its actors, so ``died`` is never called.
        """
        self._heard = heard

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Start a worker, signal one, or ask one on another node for its stacks; any thread."""
        actor = self._actors[message["rank"]]
        if message["op"] == "start":
            resources = actor.where.resources
            if actor.packet is None:
                actor.given = list(fds)
                reference = actor.handle.run_beside.remote(self._handover.name, resources)
            else:
                packet, actor.packet = actor.packet, None
                reference = actor.handle.run_afar.remote(packet, resources)
                self.loop.call(partial(self._started, actor))
            reference.future().add_done_callback(partial(self._over, actor))
        elif message["op"] == "signal":
            self._signal(actor, message["signal"])
        elif message["op"] == "stack":  # of one on another node
            where, last = actor.where, message["last"]
            stacks = far_stacks.asked(where.node_id, where.pid, where.stacks, last=last)
            stacks.add_done_callback(partial(self._stacks_came, actor, last))

    def close(self, within: float) -> None:
        """End every actor that is left, and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + max(END_SECONDS, within)
        asking, actors = Asking(end), list(self._actors.values())
        if all(actor.over for actor in actors):
            asking("end what it runs on the actors", self._tell_ended)
            # What ends by itself leaves no semaphore of Ray's, and Ray does not wonder at it.
            asking(
                "end the actors",
                lambda: [actor.handle.__ray_terminate__.remote() for actor in actors],
            )
            self._await_ends(end)
        asking("kill the actors", lambda: [ray.kill(actor.handle) for actor in actors])
        for actor in actors:
            self._end_group(actor)
        self._await_ends(end)
        for actor in actors:
            if actor.pidfd >= 0:
                os.close(actor.pidfd)
                actor.pidfd = -1
        asking("end what it runs on the actors", self._tell_ended)
        self.loop.end(END_SECONDS)
        if self._raylet >= 0:
            os.close(self._raylet)
            self._raylet = -1
        self.output.close(END_SECONDS)
        self._handover.close()
        if self._reservation is not None:
            asking("remove the placement group", self._reservation.close)
        self._session.close(answers=not asking.silent)

    def _tell_ended(self) -> None:
        for tell in self.ended:
            tell()

    def _await_ends(self, until: float) -> None:
        for actor in self._actors.values():
            if actor.pidfd >= 0:
                poll = select.poll()
                poll.register(actor.pidfd, select.POLLIN)
                poll.poll(max(0.0, until - time.monotonic()) * 1000)

    def _watch(self) -> None:
        self.loop.watch(self._handover.fileno(), self._serve)

    def _serve(self) -> None:
        pid = self._handover.serve()
        if pid is None:
            return
        actor = next(each for each in self._actors.values() if each.where.pid == pid)
        actor.given = None
        actor.session = os.getsid(pid)
        actor.pidfd = os.pidfd_open(pid)
        if self._raylet < 0:
            with suppress(ProcessLookupError):  # the actors end with it then
                self._raylet = os.pidfd_open(actor.where.raylet)
                self.loop.watch(self._raylet, partial(self._raylet_ended, actor.where.raylet))
        self._started(actor)

    def _raylet_ended(self, pid: int) -> None:
        """Tell why the actors of this node end: Ray does not know for a quarter of a minute."""
        self.loop.forget(self._raylet)
        cause = ExecutorFailedError(
            f"Ray's process on this node, the raylet (pid {pid}), ended, and the workers with it"
        )
        for actor in self._actors.values():
            if actor.pidfd >= 0 and not actor.over:
                self._tell_of(actor, None, cause)

    def _started(self, actor: _Actor) -> None:
        if self._heard is not None:
            message = {"op": "started", "rank": actor.seat.rank, "pid": actor.where.pid}
            if actor.pidfd >= 0:
                self._heard(message, [os.dup(actor.pidfd)])
            else:
                self._heard({**message, "host": f"node {actor.seat.node_id[:8]}"}, [])

    def _wanted(self, pid: int) -> list[int] | None:
        for actor in self._actors.values():
            if actor.where.pid == pid:
                return actor.given
        return None

    def _over(self, actor: _Actor, future: Any) -> None:
        """Its work has ended. Called by Ray, on a thread of its own."""
        error = future.exception()
        code = None if error is not None else future.result()
        actor.over = error is None
        self.loop.call(partial(self._tell_of, actor, code, error))

    def _tell_of(self, actor: _Actor, code: int | None, error: BaseException | None) -> None:
        if self._heard is not None:
            message = {"op": "exited", "rank": actor.seat.rank, "exit": code, "cause": error}
            self._heard(message, [])

    def _stacks_came(self, actor: _Actor, last: bool, future: Any) -> None:
        """Tell of them; end the worker if these are its ``last``. Called by Ray, as above."""
        if future.exception() is None and self._heard is not None:
            message = {"op": "stack", "rank": actor.seat.rank, "text": future.result()}
            self.loop.call(partial(self._heard, message, []))
        if last:
            self.loop.call(partial(self._kill, actor))

    def _signal(self, actor: _Actor, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._kill(actor)
        elif actor.pidfd >= 0:
            with suppress(OSError):
                signal.pidfd_send_signal(actor.pidfd, signum)

    def _kill(self, actor: _Actor) -> None:
        """End an actor by Ray, and what its process started by its group."""
        with suppress(Exception):
            ray.kill(actor.handle)
        self._end_group(actor)

    def _end_group(self, actor: _Actor) -> None:
        if actor.pidfd >= 0:
            end_group(actor.where.pid, actor.session)


def _whereabouts(
    handles: Sequence[Any], patience: float, needed: Mapping[str, float]
) -> list[Whereabouts]:
    """Return where the actors are, once all are there; raise what kept the first of them."""
    asked = [handle.where.remote() for handle in handles]
    left = list(asked)

    def come(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while left:
            ready, left[:] = ray.wait(left, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                return False
            ray.get(ready)
        return True

    awaited(
        come,
        patience,
        lambda: (
            f"{len(asked) - len(left)} of {len(asked)} are there, each in a bundle that holds what "
            f"it needs; {table(needed, len(handles), nodes())}"
        ),
        "start the workers' actors in their bundles",
    )
    found: list[Whereabouts] = ray.get(asked)
    return found
