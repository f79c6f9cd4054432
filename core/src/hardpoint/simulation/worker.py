"""A worker's process, simulated around the real host: it is slow, stops, goes on, hangs or dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import define, evolve, field, frozen

from hardpoint.errors import CancelledStepError
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.host import WorkerHost
from hardpoint.simulation.clock import Simulation
from hardpoint.simulation.network import CALLS, CONTROL, Network

DRIVER = "driver"


def address_of(rank: int) -> str:
    """Return where worker ``rank`` listens, whatever its generation."""
    return f"rank {rank}"


@frozen(kw_only=True)
class Beat:
    """A heartbeat: what the work loop is at, told by the control lane."""

    rank: int
    generation: int
    busy_since: float | None
    call: str
    step_id: int
    answer_to: int | None = None
    """Number of the ping that it answers, if it does."""


@frozen(kw_only=True)
class Ping:
    """Asks for a heartbeat at once."""

    number: int


@frozen(kw_only=True)
class Leave:
    """Orders a worker to leave what it awaits of other ranks, now and from now on; with ``work``,
    to begin no other call but its shutdown.
    """

    generation: int
    work: bool = False


@define
class Work:
    """What methods take: simulated seconds by method name, the methods in which ranks await each
    other, and the (method, rank) that never return.
    """

    seconds: dict[str, tuple[float, float]] = field(factory=dict)
    usual: tuple[float, float] = (10e-6, 2e-3)
    meetings: set[str] = field(factory=set)
    hangs: set[tuple[str, int]] = field(factory=set)
    _present: dict[tuple[int, int], dict[int, Callable[[], None]]] = field(factory=dict)

    def meet(self, key: tuple[int, int], rank: int, of: int, go_on: Callable[[], None]) -> None:
        """Enter the meeting ``key``; when ``of`` ranks have, all go on."""
        present = self._present.setdefault(key, {})
        present[rank] = go_on
        if len(present) == of:
            for each in self._present.pop(key).values():
                each()


class SimulatedWorker:
    """One process; ``ended(exit)`` is called when it has ended."""

    def __init__(
        self,
        simulation: Simulation,
        network: Network,
        host: WorkerHost,
        work: Work,
        *,
        heartbeat: float,
        ended: Callable[[int], None],
    ) -> None:
        self.simulation = simulation
        self.network = network
        self.host = host
        self.rank = host.context.rank
        self.generation = host.context.generation
        self.alive = True
        self.stopped = False
        self._work = work
        self._heartbeat = heartbeat
        self._ended = ended
        self._queue: deque[PackedCall] = deque()
        self._held: list[Callable[[], None]] = []
        self._current: PackedCall | None = None
        self._since: float | None = None
        self._left = False
        self._left_work = False
        self._deaf = network.listen(address_of(self.rank), self._hear)
        self._beat()

    @property
    def name(self) -> str:
        """The worker as the trace calls it."""
        return f"worker {self.rank} of generation {self.generation}"

    # What is done to it.

    def kill(self, exit: int = -9) -> None:
        """End it; the driver hears of that a moment later, by the kernel."""
        if self.alive:
            self.simulation.note(f"{self.name} ends ({exit})")
            self.alive = False
            self._deaf()
            moment = self.simulation.random.uniform(1e-3, 5e-3)
            self.simulation.after(moment, f"exit of {self.name}", lambda: self._ended(exit))

    def stop(self) -> None:
        """Stop it where it is."""
        self.stopped = True
        self.simulation.note(f"{self.name} stops")

    def go_on(self) -> None:
        """Let it go on; what came meanwhile, comes now."""
        self.stopped = False
        self.simulation.note(f"{self.name} goes on")
        held, self._held = self._held, []
        for action in held:
            self._do(action)

    # What it does.

    def _do(self, action: Callable[[], None]) -> None:
        """Do something now, or when the process goes on, or, if it is dead, never."""
        if self.stopped:
            self._held.append(action)
        elif self.alive:
            action()

    def _hear(self, message: Any) -> None:
        self._do(lambda: self._obey(message))

    def _obey(self, message: Any) -> None:
        if isinstance(message, PackedCall):
            if message.generation == self.generation:  # else it is for one before or after it
                self._queue.append(message)
                self._next()
        elif isinstance(message, Ping):
            self._report(message.number)
        elif isinstance(message, Leave) and message.generation == self.generation:
            self._left = True
            self._left_work |= message.work
            self._leave()

    def _next(self) -> None:
        if self._current is not None or not self._queue:
            return
        call = self._queue.popleft()
        if self._left_work and call.name != "shutdown":
            self._next()
            return
        self._current = call
        self._since = self.simulation.now
        reply = self.host.handle(call)
        if (call.name, self.rank) in self._work.hangs:
            return
        low, high = self._work.seconds.get(call.name, self._work.usual)
        seconds = self.simulation.random.uniform(low, high)

        def finish() -> None:
            self.simulation.after(seconds, "", lambda: self._do(lambda: self._finish(call, reply)))

        if call.name in self._work.meetings and reply.failure is None:
            of = self.host.context.world_size
            self._work.meet((self.generation, call.call_id), self.rank, of, finish)
            if self._left:
                self._leave()
        else:
            finish()

    def _finish(self, call: PackedCall, reply: Reply) -> None:
        if self._current is not call:
            return  # it was left
        self._current = self._since = None
        what = "an error" if reply.failure is not None else "a value"
        self.network.send(
            CALLS,
            address_of(self.rank),
            DRIVER,
            reply,
            f"{self.name} answers call {reply.call_id} with {what}",
        )
        if call.name == "shutdown":
            self.kill(0)
        self._next()

    def _leave(self) -> None:
        call = self._current
        if call is None or call.name not in self._work.meetings:
            return
        if (call.name, self.rank) in self._work.hangs:
            return  # it hangs where no order reaches it
        error = CancelledStepError(f"{call.name!r}: waiting for other ranks was ended")
        reply = Reply(
            call_id=call.call_id,
            rank=self.rank,
            generation=call.generation,
            failure=RemoteFailure.of(error),
        )
        self._finish(call, reply)

    def _beat(self) -> None:
        if self.alive:
            if not self.stopped:
                self._report()
            self.simulation.after(self._heartbeat, "", self._beat)

    def _report(self, answer_to: int | None = None) -> None:
        beat = Beat(
            rank=self.rank,
            generation=self.generation,
            busy_since=self._since,
            call="" if self._current is None else self._current.name,
            step_id=self.host.health().step_id,
        )
        self.network.send(
            CONTROL, address_of(self.rank), DRIVER, evolve(beat, answer_to=answer_to), ""
        )
