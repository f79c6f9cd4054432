"""An executor whose workers are simulated: everything above the channel is the real thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.errors import HardpointError, WorkerDiedError, WorkerSilentError
from hardpoint.executor import Executor
from hardpoint.records import WorkerContext, WorkerHealth
from hardpoint.rpc.calls import Call, Gather, Reply
from hardpoint.rpc.host import WorkerHost
from hardpoint.rpc.supervision import (
    Action,
    DumpStack,
    EndCollectives,
    Fail,
    Kill,
    Supervisor,
    Warn,
)
from hardpoint.simulation.clock import Event, Simulation
from hardpoint.simulation.network import CALLS, CONTROL, Network
from hardpoint.simulation.worker import (
    DRIVER,
    Beat,
    Leave,
    Ping,
    SimulatedWorker,
    Work,
    address_of,
)

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry

FIRST_PID = 1000


class World:
    """What outlives one executor: time, network, what work takes, and every worker that ever was.

    ``heartbeat`` and ``silent_after`` are simulated seconds, as the supervisor's.
    """

    def __init__(self, seed: int, *, heartbeat: float = 0.05, silent_after: float = 0.5) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        self.work = Work()
        self.heartbeat = heartbeat
        self.silent_after = silent_after
        self.generation = -1
        self.workers: list[SimulatedWorker] = []

    def executor_class(self) -> type[SimulatedExecutor]:
        """Return the class of executors that live in this world; each has a generation of its own,
        and hears whatever arrives at the driver's address.
        """
        return type("ExecutorHere", (SimulatedExecutor,), {"world": self})


class SimulatedExecutor(Executor):
    """Made by :meth:`World.executor_class`; started and used like any executor, in one thread.

    A call that waits lets simulated time pass.
    """

    world: ClassVar[World]
    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True

    def __init__(self, config: Config, registry: Registry, platform: Platform) -> None:
        super().__init__(config, registry, platform)
        world = self.world
        world.generation += 1
        self.generation = world.generation
        self.simulation = world.simulation
        self.clock = self.simulation.clock
        # Both have the methods that the base class uses; neither needs a thread here.
        self._deadlines = _Deadlines(self.simulation, self.calls.expire)  # type: ignore[assignment]
        self.receiver = _Receiver(self.simulation)  # type: ignore[assignment]
        self.calls.erred = self._erred
        self.workers: list[SimulatedWorker] = []
        self.warnings: list[str] = []
        self._pings = 0
        self._pongs: dict[int, Beat] = {}
        self._supervisor = Supervisor(
            self.world_size,
            self.simulation.now,
            missing=self.calls.missing,
            heartbeat=world.heartbeat,
            silent_after=world.silent_after,
        )
        self._deaf: Callable[[], None] = _nothing

    def start_workers(self) -> None:
        """Build every worker's host at once."""
        world = self.world
        self._deaf = world.network.listen(DRIVER, self._hear)
        asked = (self.config, self.platform)
        worker_class = self.registry.worker_class(*asked)
        model_runner = self.registry.model_runner_class(*asked)
        for rank in range(self.world_size):
            context = WorkerContext(
                config=self.config,
                rank=rank,
                local_rank=rank,
                world_size=self.world_size,
                model_runner=model_runner,
                generation=self.generation,
            )
            host = WorkerHost(context, self.platform, self.registry, worker_class)
            worker = SimulatedWorker(
                self.simulation,
                world.network,
                host,
                world.work,
                heartbeat=world.heartbeat,
                ended=_ended(self, rank),
            )
            self.workers.append(worker)
            world.workers.append(worker)
            self._act(self._supervisor.spawned(rank, FIRST_PID + rank, self.simulation.now))
            self._act(self._supervisor.ready(rank, self.simulation.now))
        self._watch()

    def call_workers(self, call: Call) -> None:
        """Send ``call`` to every rank, over the network."""
        packed = call.pack()
        for rank in range(self.world_size):
            self.world.network.send(
                CALLS,
                DRIVER,
                address_of(rank),
                packed,
                f"call {call.call_id} of generation {call.generation} ({call.name}) reaches {rank}",
            )

    def probe_health(self, timeout: float) -> Sequence[WorkerHealth]:
        """Ping every rank over the control lane."""
        self._pings += 1
        number = self._pings
        self._pongs.clear()
        for worker in self.workers:
            self._send_control(worker.rank, Ping(number=number))
        answered = self.simulation.run(
            lambda: len(self._pongs) == self.world_size or self.failure is not None,
            self.simulation.now + timeout,
        )
        if self.failure is not None:
            raise self.failure
        if not answered:
            rank = min(set(range(self.world_size)) - set(self._pongs))
            raise WorkerSilentError(rank=rank, pid=FIRST_PID + rank, seconds=timeout)
        return [
            WorkerHealth(rank=rank, step_id=beat.step_id, busy_since=beat.busy_since)
            for rank, beat in sorted(self._pongs.items())
        ]

    def stop_workers(self, deadline: float) -> None:
        """Ask the workers to shut down; at the deadline, kill those that have not."""
        self._supervisor.closing()
        call = Call(call_id=self.calls.next_id(), generation=self.generation, method="shutdown")
        for worker in self.workers:
            self._send_control(worker.rank, Leave(generation=self.generation, work=True))
        self.call_workers(call)
        self.simulation.run(lambda: not any(each.alive for each in self.workers), deadline)
        for worker in self.workers:
            worker.kill()
        self._deaf()
        self._deaf = _nothing

    def _send_control(self, rank: int, message: Any) -> None:
        self.world.network.send(CONTROL, DRIVER, address_of(rank), message, "")

    # What is heard, and what the supervisor says to it.

    def _hear(self, message: Any) -> None:
        if isinstance(message, Reply):
            self.calls.deliver(message)
        elif isinstance(message, Beat) and message.generation == self.generation:
            if message.answer_to == self._pings:
                self._pongs[message.rank] = message
            self._act(
                self._supervisor.heard(
                    message.rank,
                    self.simulation.now,
                    busy_since=message.busy_since,
                    call=message.call,
                )
            )

    def _erred(self, rank: int, call_id: int, error: BaseException) -> None:
        if isinstance(error, HardpointError):
            self._act(self._supervisor.erred(rank, call_id, error, self.simulation.now))

    def died(self, rank: int, exit: int) -> None:
        """Hear from the kernel that the process of ``rank`` ended."""
        self._act(self._supervisor.exited(rank, exit, self.simulation.now))

    def _watch(self) -> None:
        if self._closed and not any(each.alive for each in self.workers):
            return
        self._act(self._supervisor.tick(self.simulation.now))
        self.simulation.after(self._supervisor.next_tick() - self.simulation.now, "", self._watch)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.simulation.note(f"supervisor: {_told(action)}")
            if isinstance(action, Fail):
                self.fail(action.error)
            elif isinstance(action, EndCollectives):
                for rank in action.ranks:
                    leave = Leave(generation=self.generation, work=action.work)
                    self._send_control(rank, leave)
            elif isinstance(action, DumpStack):
                self._fetch_stack(action.rank)
            elif isinstance(action, Kill):
                self.workers[action.rank].kill()
            elif isinstance(action, Warn):
                self.warnings.append(action.text)

    def _fetch_stack(self, rank: int) -> None:
        def give() -> None:
            if self.workers[rank].alive:
                text = f"stack of rank {rank}"
                self._act(self._supervisor.stack(rank, text, self.simulation.now))

        self.simulation.after(0.01, f"stack of rank {rank} is here", give)


class _Receiver:
    """Waits by letting simulated time pass."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def wait(self, gather: Gather, deadline: float | None) -> bool:
        return self._simulation.run(lambda: gather.ended, deadline)

    def watch(self) -> None:
        """Nothing: replies arrive whoever waits."""

    def abandon(self) -> None:
        """Nothing: nobody waits for room to send."""


class _Deadlines:
    """Deadlines of calls that nobody waits for, as events."""

    def __init__(self, simulation: Simulation, expire: Callable[[int], None]) -> None:
        self._simulation = simulation
        self._expire = expire
        self._events: list[Event] = []

    def add(self, deadline: float, call_id: int) -> None:
        event = self._simulation.after(
            deadline - self._simulation.now,
            f"deadline of call {call_id}",
            lambda: self._expire(call_id),
        )
        self._events.append(event)

    def close(self) -> None:
        for event in self._events:
            event.cancel()


def _ended(executor: SimulatedExecutor, rank: int) -> Callable[[int], None]:
    return lambda code: executor.died(rank, code)


def _nothing() -> None:
    """Do nothing."""


def _told(action: Action) -> str:
    if isinstance(action, Fail):
        error = action.error
        exit_ = f" ({error.exit})" if isinstance(error, WorkerDiedError) else ""
        return f"fail: {type(error).__name__}{exit_}"
    return str(action)
