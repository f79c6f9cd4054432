"""The executor ``mp``: a process for each worker, on this host or, with ``nnodes``, several."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from hardpoint.config.problems import config_error
from hardpoint.errors import (
    ExecutorFailedError,
    HardpointError,
    HostLostError,
    StartTimeoutError,
)
from hardpoint.executor import Executor
from hardpoint.records import Listener, Problem, WorkerHealth
from hardpoint.rpc import channel
from hardpoint.rpc.calls import Call, CallTable
from hardpoint.rpc.faults import DUPLICATE, LOSE, fault
from hardpoint.rpc.supervision import Supervisor

from hardpoint_multiproc.group import EXIT_SECONDS, WorkerGroup
from hardpoint_multiproc.launching import (
    WorkerPlan,
    check_devices,
    plan_workers,
    variables_of,
)
from hardpoint_multiproc.limits import is_refusal, refused
from hardpoint_multiproc.nursery_process import NurseryProcess, NurseryStuckError, interpreter
from hardpoint_multiproc.resources import Resources, uninterrupted
from hardpoint_multiproc.settings import START_TIMEOUT, MultiprocSettings
from hardpoint_multiproc.start_choice import NURSERY, PLAIN, Way, choose

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry

STACK_SECONDS_AWAY = 3.0
"""For how long the stack of a worker that may be on another host is awaited."""


class MultiprocExecutor(Executor):
    """Runs each worker in a process of its own.

    A small process, the nursery, starts them and ends them: neither is the user's process forked,
    nor is its script run again. Calls go through shared memory; a control lane beside it tells
    whether a worker lives, whatever it is doing. A worker's death fails the executor.
    """

    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True
    start_key: ClassVar[str] = START_TIMEOUT
    """The key that an error of a start that takes too long names."""
    exit_seconds: ClassVar[float] = EXIT_SECONDS
    """For how long the word on a dead worker's exit is awaited."""
    _resources: Resources | None = None
    _send: Callable[[Call], None] | None = None

    @classmethod
    def prepare(
        cls, config: Config, registry: Registry, platform: Platform
    ) -> NurseryProcess | None:
        """Begin to start the nursery, while the driver is still reading the model's description."""
        settings = settings_of(config, registry)
        if settings.start == PLAIN or not platform.fork_safe().safe:
            return None
        return NurseryProcess(platform.preload)

    @classmethod
    def listeners(
        cls, config: Config, registry: Registry, platform: Platform
    ) -> Sequence[Listener]:
        """Return the collective library's, and with several hosts the driver's own."""
        from hardpoint_multiproc.listeners import of_mp

        return of_mp(config, settings_of(config, registry), platform)

    def start_workers(self) -> None:
        """Start all workers at once; raise the first one's failure with its last lines.

        Raises ConfigError if ``plugins.mp.start = "nursery"`` and the platform cannot be forked.
        """
        try:
            self._start_workers()
        except (OSError, RuntimeError) as error:
            if isinstance(error, HardpointError) or not is_refusal(error):
                raise
            raise refused(error) from error

    def _start_workers(self) -> None:
        settings = settings_of(self.config, self.registry)
        check_devices(self)
        if self.config.parallel.nnodes > 1:
            self._start_on_hosts(settings)
            return
        variables = variables_of(self)
        way = self._way(settings, variables)
        call = Call(
            call_id=self.calls.next_id(), generation=self.generation, method="start the worker"
        )
        plans = plan_workers(self, variables, self.codec, call.call_id, settings)
        resources = Resources(self.calls, self.generation, self._nursery(way))
        # What it waits for is the nursery.
        agree = partial(self._way_of, way, settings, resources.nursery)
        self.bring_up(resources, settings, call, plans, agree)

    def _start_on_hosts(self, settings: MultiprocSettings) -> None:
        """Start this host's share of the workers, and have the other hosts start theirs."""
        from hardpoint_multiproc.hosts import start  # the network's library is for them alone

        plan = start.plan_of(self, settings)
        way = self._way(settings, variables_of(self))
        hosts = start.gather_hosts(self, settings, self._nursery(way), plan)
        call = Call(
            call_id=self.calls.next_id(), generation=self.generation, method="start the worker"
        )
        try:
            resources, plans = start.spread(self, settings, hosts, plan, call)
        except BaseException:
            hosts.close(0.0)
            raise
        hosts.on_lost(self._lost)
        agree = partial(self._way_of, way, settings, hosts.nursery)
        self.bring_up(resources, settings, call, plans, agree)

    def _lost(self, error: HostLostError) -> None:
        if self._resources is not None and self._resources.group is not None:
            self._resources.group.give_up(error)

    def bring_up(
        self,
        resources: Resources,
        settings: MultiprocSettings,
        call: Call,
        plans: Sequence[WorkerPlan],
        agree: Callable[[], str],
    ) -> None:
        """Make what the workers are called by, start them the way that ``agree()`` returns, and
        wait until all have acknowledged ``call``.
        """
        self._resources = resources
        self._finalizer = weakref.finalize(self, Resources.release, resources)
        kind = channel.usual_kind() if settings.channel == "auto" else settings.channel
        uninterrupted(partial(resources.make, kind, self.config.rpc.spin_us, self.codec, plans))
        self.receiver, self.calls.claims = resources.receiver, resources.claims
        self._send, self.rouse = resources.end.send, resources.end.rouse
        gather = self.calls.open(call, self.world_size)
        output = resources.nursery.output
        agreed = agree()
        resources.group = group = WorkerGroup(
            resources.nursery,
            self._supervisor(settings),
            _failing(self, self.calls),
            command=interpreter(),
            may_change=settings.start == "auto",
            start_timeout=settings.start_timeout,
            tidy=resources.end.tidy,
            start_key=self.start_key,
            exit_seconds=self.exit_seconds,
        )
        self.calls.erred = group.erred
        group.start(resources.launches, agreed)
        try:
            self._await(gather, None)
            group.await_processes(settings.start_timeout)
        except HardpointError as error:
            rank = getattr(error, "rank", None)
            lines = output.last_lines(rank) if rank is not None else ()
            if lines and not hasattr(error, "last_lines"):
                text = "\n  ".join(lines)
                error.add_note(f"--- last lines of rank {rank} ---\n  {text}")
            raise

    def call_workers(self, call: Call) -> None:
        """Send ``call`` to every worker."""
        if not fault.active and self._send is not None:
            self._send(call)
            return
        end = self._open().end
        outcome = fault("call.before_send")
        if outcome != LOSE:
            end.send(call)
        if outcome == DUPLICATE:
            end.send(call)
        fault("call.after_send")

    def probe_health(self, timeout: float) -> Sequence[WorkerHealth]:
        """Ping every worker by its control lane."""
        return self._open().workers.probe(timeout)

    def stop_workers(self, deadline: float) -> None:
        """Let the workers shut down, and end those that do not."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None:  # the start did not come to use it
            prepared.close()
        resources = self._resources
        if resources is not None:
            self._finalizer.detach()
            resources.close(deadline)

    def _open(self) -> Resources:
        if self._resources is None:
            raise ExecutorFailedError("the workers were not started")
        return self._resources

    def _way(self, settings: MultiprocSettings, variables: list[dict[str, str]]) -> Way:
        wanted = {name: value for each in variables for name, value in each.items()}
        try:
            way = choose(settings.start, self.platform.fork_safe(), wanted)
        except ValueError as error:
            raise self._unforkable(str(error)) from None
        level = (
            self.logger.warning
            if way.kind == PLAIN and settings.start == "auto"
            else self.logger.info
        )
        level("workers start by way of %s: %s", way.kind, way.reason)
        return way

    def _unforkable(self, why: str) -> HardpointError:
        return config_error(
            [
                Problem(
                    key="plugins.mp.start",
                    value=NURSERY,
                    message=f"{why}.",
                    way_out="Set it to plain, or to auto, which chooses.",
                    origin=self.config.origins.get("plugins.mp.start", ""),
                )
            ]
        )

    def _nursery(self, way: Way) -> NurseryProcess:
        prepared, self.prepared = self.prepared, None
        if isinstance(prepared, NurseryProcess):
            return prepared
        return NurseryProcess(self.platform.preload if way.kind == NURSERY else None)

    def _way_of(self, way: Way, settings: MultiprocSettings, nursery: NurseryProcess) -> str:
        """Return the way that the nursery can go: a module of the platform may not have let it."""
        try:
            problem = nursery.wait_ready(settings.start_timeout)
        except NurseryStuckError as error:
            stages = dict.fromkeys(range(self.world_size), "waiting for the nursery")
            raise StartTimeoutError(
                seconds=error.seconds, stages=stages, key=START_TIMEOUT
            ) from error
        if not problem or way.kind == PLAIN:
            return way.kind
        if settings.start == NURSERY:
            raise self._unforkable(f"the nursery cannot be forked: {problem}")
        self.logger.warning("workers start plain: the nursery cannot be forked: %s", problem)
        return PLAIN

    def _supervisor(self, settings: MultiprocSettings) -> Supervisor:
        made = Supervisor(
            self.world_size,
            time.monotonic(),
            missing=self.calls.missing,
            heartbeat=self.config.rpc.heartbeat,
            silent_after=self.platform.silent_after,
            start_timeout=settings.start_timeout,
            start_key=self.start_key,
            warn_after=settings.warn_after,
            hang_after=settings.hang_after,
        )
        if self.config.parallel.nnodes > 1:
            made.stack_wait = STACK_SECONDS_AWAY
        return made


def settings_of(config: Config, registry: Registry) -> MultiprocSettings:
    """Return the settings of ``mp``, also while ``config`` has them as raw keys."""
    found = config.settings_of("mp")
    if not isinstance(found, MultiprocSettings) and registry.has("executor", "mp"):
        found = registry.settings("executor", "mp")
    return found if isinstance(found, MultiprocSettings) else MultiprocSettings()


def _failing(executor: MultiprocExecutor, calls: CallTable) -> Callable[[HardpointError], None]:
    """Return a function that fails the executor if it is still there, without holding it."""
    held = weakref.ref(executor)

    def fail(error: HardpointError) -> None:
        living = held()
        if living is not None:
            living.fail(error)
        else:
            calls.fail_all(error)

    return fail
