"""The executor ``external_launcher``: a worker in each process that the user's launcher started."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from hardpoint.config.problems import config_error, with_origin
from hardpoint.errors import ExecutorFailedError, HardpointError, WorkerSilentError
from hardpoint.executor import Executor, Prepared
from hardpoint.records import Listener, Problem, WorkerContext, WorkerHealth
from hardpoint.references import resolve_class
from hardpoint.rpc.host import WorkerHost

from hardpoint_external_launcher.agreement import identity
from hardpoint_external_launcher.group import Group, Plan
from hardpoint_external_launcher.launchers import Seat, rank_of, seat_of
from hardpoint_external_launcher.listeners import of_ranks
from hardpoint_external_launcher.programs import FollowerProgram
from hardpoint_external_launcher.settings import ExternalLauncherSettings

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry
    from hardpoint.rpc.calls import Call


class ExternalLauncherExecutor(Executor):
    """Runs this process's worker on a thread of its own, and works together with the executors of
    the launcher's other processes.

    Every process runs the same program, so that each makes the same calls; what the workers answer
    is exchanged, and every process has the same result.
    """

    plans_alike: ClassVar[bool] = True
    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True
    _group: Group | None = None

    @classmethod
    def tells_results(cls, config: Config) -> bool:
        """Only rank 0 prints."""
        return rank_of(os.environ) in (0, None)

    @classmethod
    def listeners(
        cls, config: Config, registry: Registry, platform: Platform
    ) -> Sequence[Listener]:
        """Return the store at which the ranks meet, and what collectives may open."""
        return of_ranks(config, platform, os.environ)

    @classmethod
    def start(
        cls,
        config: Config,
        registry: Registry,
        platform: Platform,
        prepared: Prepared | None = None,
    ) -> Self:
        """Start as every executor; with ``driver_only`` it is a DriverExecutor that is started."""
        kind = cls
        if cls is ExternalLauncherExecutor and settings_of(config, registry).driver_only:
            kind = resolve_class("hardpoint_external_launcher.driver:DriverExecutor", cls)
        return super(ExternalLauncherExecutor, kind).start(config, registry, platform, prepared)

    def start_workers(self) -> None:
        """Meet the other processes and build this one's worker.

        Raises ConfigError naming variables of the launcher that are missing or contradict each
        other, keys in which the ranks differ, and variables that the worker lacks. With
        ``driver_only``, on another rank than 0, it serves and does not return: it raises SystemExit
        when rank 0 is done, or what went wrong.
        """
        settings = settings_of(self.config, self.registry)
        seat = seat_of(os.environ)
        self._check(seat)
        plan = Plan(
            seat=seat,
            settings=settings,
            identity=identity(self.config, self.registry),
            calls=self.calls,
            deadlines=self._deadlines,
            codec=self.codec,
            registry=self.registry,
            heartbeat=self.config.rpc.heartbeat,
            silent_after=self.platform.silent_after,
            build=self._builder(seat),
            fail=_failing(self),
        )
        self._group = group = Group(plan)
        self._finalizer = weakref.finalize(self, group.release)
        group.start()
        if isinstance(group.program, FollowerProgram):
            group.program.ended.wait()
            if group.failure is not None:
                raise group.failure
            raise SystemExit(0)

    def draw_seed(self) -> int:
        """Return a seed that all ranks agree on."""
        group = self._group
        if group is None or group.company is None:
            raise ExecutorFailedError("the ranks have not met: no seed is agreed on")
        return group.company.seed

    def call_workers(self, call: Call) -> None:
        """Have all ranks' workers run ``call``."""
        group = self._group
        if group is None or group.program is None:
            raise ExecutorFailedError("the workers were not started")
        group.program.call(call)

    def probe_health(self, timeout: float) -> Sequence[WorkerHealth]:
        """Ask all ranks for a sign of life."""
        group = self._group
        if group is None or group.peers is None:
            raise ExecutorFailedError("the workers were not started")
        told = group.health(timeout)
        for rank in range(self.world_size):
            if all(each.rank != rank for each in told):
                self._require_alive()
                line = group.peers.lines.get(rank)
                pid = os.getpid() if line is None else line.pid
                raise WorkerSilentError(rank=rank, pid=pid, seconds=timeout)
        return told

    def stop_workers(self, deadline: float) -> None:
        """Leave the other ranks, and shut this one's worker down."""
        if self._group is None:
            return
        if self._group.stop(deadline):
            self._finalizer.detach()
        elif not self.called_from_worker():
            self.logger.warning(
                "the worker is still busy at the deadline of the shutdown; its thread is left "
                "behind and shuts the worker down when its call returns"
            )

    def called_from_worker(self) -> bool:
        """Whether the calling thread is the worker's."""
        thread = None if self._group is None else self._group.thread
        return thread is not None and thread.is_current()

    # Within.

    def _check(self, seat: Seat) -> None:
        if seat.world_size != self.world_size:
            problem = Problem(
                key=seat.size_variable,
                value=seat.world_size,
                message=f"{seat.launcher} started {seat.world_size} processes, and the "
                f"configuration needs {self.world_size} workers, one in each.",
                way_out=f"Start {self.world_size}, or change tensor_parallel_size and "
                "pipeline_parallel_size.",
            )
            raise config_error([problem])
        wanted = {
            **self.platform.environment(self.config, self.placement),
            **self.registry.worker_env(self.config, seat.rank),
        }
        problems = [
            Problem(
                key="executor",
                value="external_launcher",
                message=f"the worker of rank {seat.rank} needs {name}={value!r}, and its process "
                f"has {os.environ.get(name)!r}.",
                way_out=f"Have the launcher set {name}={value}.",
            )
            for name, value in wanted.items()
            if os.environ.get(name) != value
        ]
        if problems:
            raise config_error([with_origin(each, self.config.origins) for each in problems])

    def _builder(self, seat: Seat) -> Callable[[Callable[[], bool], str | None], WorkerHost]:
        return partial(
            _build_host,
            self.config,
            self.platform,
            self.registry,
            seat,
            self.generation,
            self.registry.worker_class(self.config, self.platform),
            self.registry.model_runner_class(self.config, self.platform),
            self._devices(seat),
        )

    def _devices(self, seat: Seat) -> tuple[str, ...]:
        """Return the devices of this rank: all that its own process names, or, where they are as
        many as those of all ranks of the host, its part.
        """
        each, devices = self.placement.devices_per_worker, self.config.device.devices or ()
        if len(devices) <= each:
            return tuple(devices)
        return tuple(devices[seat.local_rank * each : (seat.local_rank + 1) * each])


def settings_of(config: Config, registry: Registry) -> ExternalLauncherSettings:
    """Return the plugin's own keys, also while ``config`` has them raw."""
    found = config.settings_of("external_launcher")
    raw = not isinstance(found, ExternalLauncherSettings)
    if raw and registry.has("executor", "external_launcher"):
        found = registry.settings("executor", "external_launcher")
    return found if isinstance(found, ExternalLauncherSettings) else ExternalLauncherSettings()


def _build_host(
    config: Config,
    platform: Platform,
    registry: Registry,
    seat: Seat,
    generation: int,
    worker_class: str,
    model_runner: str,
    devices: tuple[str, ...],
    cancelled: Callable[[], bool],
    rendezvous: str | None,
) -> WorkerHost:
    context = WorkerContext(
        config=config,
        rank=seat.rank,
        local_rank=seat.local_rank,
        world_size=seat.world_size,
        devices=devices,
        rendezvous=rendezvous,
        model_runner=model_runner,
        generation=generation,
        cancelled=cancelled,
    )
    return WorkerHost(context, platform, registry, worker_class)


def _failing(executor: ExternalLauncherExecutor) -> Callable[[HardpointError], None]:
    """Return a function that fails the executor if it is still there, without holding it."""
    held, calls = weakref.ref(executor), executor.calls

    def fail(error: HardpointError) -> None:
        living = held()
        if living is not None:
            living.fail(error)
        else:
            calls.fail_all(error)

    return fail
