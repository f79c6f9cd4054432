"""The in-process executor."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from hardpoint.errors import ConfigError, WorkerDiedError
from hardpoint.executor import Executor
from hardpoint.records import Problem, WorkerContext, WorkerHealth
from hardpoint.rpc.host import WorkerHost
from hardpoint.rpc.worker_thread import WorkerThread
from hardpoint.selection import several_workers

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry
    from hardpoint.rpc.calls import Call


class UniProcExecutor(Executor):
    """Runs its one worker on one dedicated thread of the driver's process.

    So timeouts, futures, health and Ctrl-C behave as elsewhere. Calls run one after the other; one
    that timed out finishes in the background, and later ones queue behind it. A call that was
    cancelled while it queued never runs. Arguments and results are copied unless immutable.
    """

    supports_async_scheduling: ClassVar[bool] = True
    _thread: WorkerThread | None = None

    def start_workers(self) -> None:
        """Build the worker on its thread. Raises ConfigError for more than one worker, or for
        variables that must be set before this process started.
        """
        self._check()
        build = partial(
            _build_host,
            self.config,
            self.platform,
            self.registry,
            self.generation,
            self.registry.worker_class(self.config, self.platform),
            self.registry.model_runner_class(self.config, self.platform),
        )
        thread = WorkerThread(build, self.calls, self._deadlines, _failing(self))
        self._thread = thread
        self._finalizer = weakref.finalize(self, thread.release)
        thread.start()

    def call_workers(self, call: Call) -> None:
        """Queue ``call`` for the worker."""
        packed = call.pack(self.codec)
        if self._thread is not None:
            self._thread.submit(packed)

    def probe_health(self, timeout: float) -> Sequence[WorkerHealth]:
        """Return what the worker's loop wrote of its progress; it needs no turn of the loop."""
        health = None if self._thread is None else self._thread.health()
        if health is None:
            raise WorkerDiedError(rank=0, pid=os.getpid(), exit=None)
        return [health]

    def stop_workers(self, deadline: float) -> None:
        """Let the running call leave, shut the worker down, and join its thread by ``deadline``."""
        if self._thread is None:
            return
        if self._thread.stop(deadline):
            self._finalizer.detach()
        elif not self._thread.is_current():
            self.logger.warning(
                "the worker is still busy at the deadline of the shutdown; its thread is left "
                "behind and shuts the worker down when its call returns"
            )

    def called_from_worker(self) -> bool:
        """Whether the calling thread is the worker's."""
        return self._thread is not None and self._thread.is_current()

    def _check(self) -> None:
        if self.world_size != 1:
            problem = several_workers(
                self.config,
                self.platform,
                "and executor 'uni' starts one.",
                "Choose an executor that starts several ('mp' on one host), or a size of one.",
            )
            raise ConfigError(str(problem), problems=(problem,))
        wanted = {
            **self.platform.environment(self.config, self.placement),
            **self.registry.worker_env(self.config, 0),
        }
        problems = [
            Problem(
                key="executor",
                value="uni",
                message=f"the worker needs {name}={value!r}, and this process has "
                f"{os.environ.get(name)!r}.",
                way_out=f"Start it with {name}={value}, or use executor = 'mp'.",
            )
            for name, value in wanted.items()
            if os.environ.get(name) != value
        ]
        if problems:
            raise ConfigError("; ".join(map(str, problems)), problems=problems)


def _failing(executor: UniProcExecutor) -> Callable[[BaseException], None]:
    """Return a function that fails the executor if it is still there, without holding it."""
    held = weakref.ref(executor)

    def died(error: BaseException) -> None:
        living = held()
        if living is not None:
            death = WorkerDiedError(rank=0, pid=os.getpid(), exit=None)
            death.__cause__ = error
            living.fail(death)

    return died


def _build_host(
    config: Config,
    platform: Platform,
    registry: Registry,
    generation: int,
    worker_class: str,
    model_runner: str,
    cancelled: Callable[[], bool],
) -> WorkerHost:
    context = WorkerContext(
        config=config,
        rank=0,
        local_rank=0,
        world_size=1,
        devices=config.device.devices or (),
        model_runner=model_runner,
        generation=generation,
        cancelled=cancelled,
    )
    return WorkerHost(context, platform, registry, worker_class)
