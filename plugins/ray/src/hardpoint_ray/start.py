"""From a configuration to actors in their bundles, and all that the group is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from attrs import field, frozen
from hardpoint.rpc.calls import Call
from hardpoint.rpc.network.hub import codec_across
from hardpoint_multiproc.launching import WorkerPlan, plan_workers, variables_of
from hardpoint_multiproc.resources import Resources
from hardpoint_multiproc.settings import MultiprocSettings
from hardpoint_multiproc.spread import SpreadResources
from hardpoint_multiproc.start_choice import PLAIN
from hardpoint_multiproc.titles import title_of

from hardpoint_ray import model_files, placement, session
from hardpoint_ray.actor import WorkerActor
from hardpoint_ray.actors import Actors
from hardpoint_ray.node_environment import variables_on_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hardpoint.executor import Executor
    from hardpoint.rpc.encoding import Codec

    from hardpoint_ray.placement import Seat
    from hardpoint_ray.settings import RaySettings


@frozen(kw_only=True)
class Crew:
    """What actors are made: their class, what all are given, and what is done as soon as they are
    there, before any is at work: ``created(actors)``.
    """

    kind: type[WorkerActor] = WorkerActor
    arguments: Mapping[str, Any] = field(factory=dict)
    created: Callable[[Actors], None] = field(default=lambda actors: None)


@frozen(kw_only=True)
class Start:
    """What a group of actors that are there is brought up with. ``call`` is what each worker
    acknowledges once it is built.
    """

    resources: Resources
    watching: MultiprocSettings
    call: Call
    plans: Sequence[WorkerPlan]


def placed(
    executor: Executor, settings: RaySettings, crew_of: Callable[[Sequence[Seat]], Crew]
) -> Start:
    """Connect to Ray, reserve the bundles and create the actors, as ``crew_of(seats)`` says.

    Raises PlacementError, ConfigError, ExecutorFailedError; nothing is left then.
    """
    needed, count = placement.needs(executor.placement), executor.world_size
    total = {name: amount * count for name, amount in needed.items()}
    actors = Actors(session.connect(settings, total))
    try:
        reservation = placement.reserve(settings, executor.placement)
        placement.warn_of_spread(reservation.seats, executor.config.parallel.tensor_parallel_size)
        titles = [title_of(executor.config, rank, count) for rank in range(count)]
        variables = variables_on_nodes(
            variables_of(executor), reservation.seats, executor.config.parallel.forward_env
        )
        crew = crew_of(reservation.seats)
        patience = settings.placement_timeout
        actors.create(reservation, needed, titles, variables, patience, crew.kind, crew.arguments)
        model_files.compare(executor.config, _abroad(actors))
        crew.created(actors)
        return _start(executor, settings, actors, reservation.seats)
    except BaseException:
        actors.close(0.0)
        raise


def _abroad(actors: Actors) -> dict[str, Any]:
    """Return an actor of each node but the driver's, by the node's name."""
    here, found = ray.get_runtime_context().get_node_id(), actors.one_of_each_node
    if set(found) <= {here}:
        return {}
    known = placement.addresses()
    return {
        f"node {node[:8]} ({known[node]})": actor for node, actor in found.items() if node != here
    }


def _start(
    executor: Executor, settings: RaySettings, actors: Actors, seats: Sequence[Seat]
) -> Start:
    call = Call(
        call_id=executor.calls.next_id(), generation=executor.generation, method="start the worker"
    )
    watching = MultiprocSettings(
        start=PLAIN,
        start_timeout=settings.start_timeout,
        warn_after=settings.warn_after,
        hang_after=settings.hang_after,
        bind=False,
    )
    locals_ = [seat.local_rank for seat in seats]

    def plans(codec: Codec) -> list[WorkerPlan]:
        return plan_workers(executor, [{}] * len(seats), codec, call.call_id, watching, locals_)

    here = ray.get_runtime_context().get_node_id()
    far = [seat.rank for seat in seats if seat.node_id != here]
    if not far:
        resources = Resources(executor.calls, executor.generation, actors)  # type: ignore[arg-type]
    else:
        addresses = placement.addresses()
        abroad = plans(codec_across(executor.registry))
        resources = SpreadResources(
            executor.calls,
            executor.generation,
            actors,
            actors.give,
            hosts=[addresses[seat.node_id] for seat in seats],
            far={rank: abroad[rank] for rank in far},
            listen=settings.listen or addresses[here],
            registry=executor.registry,
        )
    return Start(resources=resources, watching=watching, call=call, plans=plans(executor.codec))
