"""The executor ``ray``: an actor for each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hardpoint.rpc.calls import Call
from hardpoint_multiproc.executor import MultiprocExecutor
from hardpoint_multiproc.launching import check_devices, plan_workers, variables_of
from hardpoint_multiproc.resources import Resources
from hardpoint_multiproc.settings import MultiprocSettings
from hardpoint_multiproc.start_choice import PLAIN
from hardpoint_multiproc.titles import title_of

from hardpoint_ray import placement, session
from hardpoint_ray.actors import Actors
from hardpoint_ray.settings import START_TIMEOUT, RaySettings

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry


class RayExecutor(MultiprocExecutor):
    """Runs each worker in a Ray actor, one for each bundle of a placement group.

    Ray places, starts and ends them and tells how they died; calls never go through it: they take
    the same channels as those of ``mp``, and so do health and the order to end.
    """

    uses_ray: ClassVar[bool] = True
    start_key: ClassVar[str] = START_TIMEOUT
    exit_seconds: ClassVar[float] = 1.5
    """Ray tells of an actor's end a moment after the system."""

    @classmethod
    def prepare(cls, config: Config, registry: Registry, platform: Platform) -> None:
        """Begin nothing: which resources are needed is known only later."""

    def _start_workers(self) -> None:
        settings = settings_of(self.config, self.registry)
        check_devices(self)
        needed = placement.needs(self.placement)
        count = self.world_size
        total = {name: amount * count for name, amount in needed.items()}
        actors = Actors(session.connect(settings, total))
        try:
            seats = placement.reserve(settings, self.placement)
            titles = [title_of(self.config, rank, count) for rank in range(count)]
            actors.create(seats, needed, titles, variables_of(self))
        except BaseException:
            actors.close(0.0)
            raise
        start = Call(
            call_id=self.calls.next_id(), generation=self.generation, method="start the worker"
        )
        watching = MultiprocSettings(
            start=PLAIN,
            start_timeout=settings.start_timeout,
            warn_after=settings.warn_after,
            hang_after=settings.hang_after,
            bind=False,
        )
        plans = plan_workers(self, [{}] * count, self.codec, start.call_id, watching)
        resources = Resources(self.calls, self.generation, actors)
        self.bring_up(resources, watching, start, plans, lambda: PLAIN)


def settings_of(config: Config, registry: Registry) -> RaySettings:
    """Return the settings of ``ray``, also while ``config`` has them as raw keys."""
    found = config.settings_of("ray")
    if not isinstance(found, RaySettings) and registry.has("executor", "ray"):
        found = registry.settings("executor", "ray")
    return found if isinstance(found, RaySettings) else RaySettings()
