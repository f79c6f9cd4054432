"""The executor ``ray``: an actor for each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import ray
from hardpoint.rpc.calls import Call
from hardpoint.rpc.network.hub import codec_across
from hardpoint_multiproc.executor import MultiprocExecutor
from hardpoint_multiproc.launching import (
    WorkerPlan,
    check_devices,
    plan_workers,
    variables_of,
)
from hardpoint_multiproc.resources import Resources
from hardpoint_multiproc.settings import MultiprocSettings
from hardpoint_multiproc.start_choice import PLAIN
from hardpoint_multiproc.titles import title_of

from hardpoint_ray import placement, session
from hardpoint_ray.actors import Actors
from hardpoint_ray.resources import SpreadResources
from hardpoint_ray.settings import START_TIMEOUT, RaySettings

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry
    from hardpoint.rpc.encoding import Codec


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
            reservation = placement.reserve(settings, self.placement)
            titles = [title_of(self.config, rank, count) for rank in range(count)]
            actors.create(reservation, needed, titles, variables_of(self))
            addresses = placement.addresses()
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
        locals_ = [seat.local_rank for seat in reservation.seats]

        def plans(codec: Codec) -> list[WorkerPlan]:
            return plan_workers(self, [{}] * count, codec, start.call_id, watching, locals_)

        here = ray.get_runtime_context().get_node_id()
        far = [seat.rank for seat in reservation.seats if seat.node_id != here]
        if far:
            abroad = plans(codec_across(self.registry))
            resources: Resources = SpreadResources(
                self.calls,
                self.generation,
                actors,
                hosts=[addresses[seat.node_id] for seat in reservation.seats],
                far={rank: abroad[rank] for rank in far},
                listen=settings.listen or addresses[here],
                registry=self.registry,
            )
        else:
            resources = Resources(self.calls, self.generation, actors)  # type: ignore[arg-type]
        self.bring_up(resources, watching, start, plans(self.codec), lambda: PLAIN)


def settings_of(config: Config, registry: Registry) -> RaySettings:
    """Return the settings of ``ray``, also while ``config`` has them as raw keys."""
    found = config.settings_of("ray")
    if not isinstance(found, RaySettings) and registry.has("executor", "ray"):
        found = registry.settings("executor", "ray")
    return found if isinstance(found, RaySettings) else RaySettings()
