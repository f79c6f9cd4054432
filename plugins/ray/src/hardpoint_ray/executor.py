"""The executor ``ray``: an actor for each worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint_multiproc.executor import MultiprocExecutor
from hardpoint_multiproc.launching import check_devices
from hardpoint_multiproc.start_choice import PLAIN

from hardpoint_ray.settings import START_TIMEOUT, RaySettings

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.messages import GrammarOutput, SchedulerOutput, StepTicket
    from hardpoint.platform import Platform
    from hardpoint.records import Listener
    from hardpoint.registry import Registry
    from hardpoint.rpc.supervision import Supervisor
    from hardpoint_multiproc.settings import MultiprocSettings

    from hardpoint_ray.metrics import StepMetrics
    from hardpoint_ray.placement import Seat
    from hardpoint_ray.start import Crew

STACK_SECONDS_AWAY = 15.0
"""For how long a worker's stack is awaited: Ray may have to start a process on its node to ask."""


class RayExecutor(MultiprocExecutor):
    """Runs each worker in a Ray actor, one for each bundle of a placement group.

    Ray places, starts and ends them and tells how they died; calls never go through it: they take
    the same channels as those of ``mp``, and so do health and the order to end.
    """

    uses_ray: ClassVar[bool] = True
    start_key: ClassVar[str] = START_TIMEOUT
    exit_seconds: ClassVar[float] = 1.5
    """Ray tells of an actor's end a moment after the system."""
    _metrics: StepMetrics | None = None

    @classmethod
    def prepare(cls, config: Config, registry: Registry, platform: Platform) -> None:
        """Begin nothing: which resources are needed is known only later."""

    @classmethod
    def listeners(
        cls, config: Config, registry: Registry, platform: Platform
    ) -> Sequence[Listener]:
        """Return the collective library's, the driver's own for other nodes, and Ray's."""
        from hardpoint_ray.listeners import of_ray

        return of_ray(settings_of(config, registry), platform.placement(config).num_workers)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run one step as every executor does; count it if ``plugins.ray.metrics`` says so."""
        metrics, began = self._metrics, time.monotonic()
        output = super().execute_model(scheduler_output, non_block)
        if metrics is None:
            return output

        def count(found: object) -> None:
            metrics.step(scheduler_output, found, time.monotonic() - began)

        return _counted(output, non_block, count)

    def sample_tokens(
        self, ticket: StepTicket, grammar: GrammarOutput | None = None, non_block: bool = False
    ) -> Any:
        """Finish a step as every executor does; count its tokens as above."""
        output = super().sample_tokens(ticket, grammar, non_block)
        return output if self._metrics is None else _counted(output, non_block, self._metrics.gave)

    def _start_workers(self) -> None:
        from hardpoint_ray.start import placed  # which imports Ray

        settings = settings_of(self.config, self.registry)
        check_devices(self)
        start = placed(self, settings, self._crew)
        if settings.metrics:
            from hardpoint_ray.metrics import StepMetrics

            self._metrics = StepMetrics()
            self.register_failure_callback(self._metrics.failed)
        self.bring_up(start.resources, start.watching, start.call, start.plans, lambda: PLAIN)

    def _supervisor(self, settings: MultiprocSettings) -> Supervisor:
        made = super()._supervisor(settings)
        made.stack_wait = STACK_SECONDS_AWAY
        return made

    def _crew(self, seats: Sequence[Seat]) -> Crew:
        """Return what actors there are to be, now that it is known where."""
        from hardpoint_ray.start import Crew

        return Crew()


def _counted(output: Any, non_block: bool, count: Callable[[object], None]) -> Any:
    """Return ``output``, of which ``count`` is told; with ``non_block`` when it is there."""
    if not non_block:
        count(output)
        return output

    def told(future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            count(future.result())

    output.add_done_callback(told)
    return output


def settings_of(config: Config, registry: Registry) -> RaySettings:
    """Return the settings of ``ray``, also while ``config`` has them as raw keys."""
    found = config.settings_of("ray")
    if not isinstance(found, RaySettings) and registry.has("executor", "ray"):
        found = registry.settings("executor", "ray")
    return found if isinstance(found, RaySettings) else RaySettings()
