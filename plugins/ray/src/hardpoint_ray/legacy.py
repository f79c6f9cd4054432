"""The executor ``ray_legacy``: as ``ray``, with steps by a compiled graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hardpoint.rpc.network.hub import codec_across

from hardpoint_ray.executor import RayExecutor

if TYPE_CHECKING:
    from hardpoint.errors import HardpointError
    from hardpoint.rpc.calls import Call

    from hardpoint_ray.actors import Actors
    from hardpoint_ray.placement import Seat
    from hardpoint_ray.start import Crew
    from hardpoint_ray.step_graph import Shape, StepGraph

STEPS = frozenset({"execute_model", "sample_tokens"})
"""The calls that go by the graph."""
LEAST_DEPTH = 4
LEAST_MOST = 1 << 20
DEPTH_ACROSS = 1
"""Steps in a graph that spans nodes: with a second one on its way, a channel of Ray 2.60 to another
node loses messages (seen: the step after the one that was due). To go when a Ray does not.
"""


class RayLegacyExecutor(RayExecutor):
    """Runs steps through a compiled graph of Ray: what a step computes with, what pipeline stages
    hand on, and the output rank's answer go by Ray's own channels. All else is as with ``ray``.
    """

    graph: StepGraph | None = None
    """The graph by which steps go, once the actors are there."""

    def call_workers(self, call: Call) -> None:
        """Send ``call`` to every worker: a step by the graph."""
        if self.graph is not None and type(call.method) is str and call.method in STEPS:
            self.graph.send(call, super().call_workers)
        else:
            super().call_workers(call)

    def give_up(self, error: HardpointError) -> None:
        """Fail the group by ``error``, unless it has failed. Any thread."""
        resources = self._resources
        if resources is not None and (group := resources.group) is not None:
            resources.nursery.loop.call(partial(group.give_up, error))

    def _crew(self, seats: Sequence[Seat]) -> Crew:
        from hardpoint_ray.graph_actor import GraphActor
        from hardpoint_ray.start import Crew
        from hardpoint_ray.step_graph import shape_of

        across = len({seat.node_id for seat in seats}) > 1
        shape = shape_of(
            self.world_size,
            self.parallel_config.pipeline_parallel_size,
            DEPTH_ACROSS if across else max(LEAST_DEPTH, self.max_concurrent_batches + 1),
            self.output_rank,
        )
        carries = len(shape.stages) > 1
        if across:  # what crosses nodes is data of known types, and a graph has one codec
            self.codec = codec_across(self.registry)
        return Crew(
            kind=GraphActor,
            arguments={
                "answers": shape.answers,
                "carries": carries,
                "most": self._most_handed_on() if across and carries else None,
            },
            created=partial(self._compile, shape),
        )

    def _compile(self, shape: Shape, actors: Actors) -> None:
        """Compile the graph, of which the actors' threads are a part from then on."""
        from hardpoint_ray.step_graph import StepGraph

        self.graph = StepGraph(actors.handles, shape, self.codec, self.calls, _giving_up(self))
        actors.ended.append(self.graph.close)

    def _most_handed_on(self) -> int:
        """Return the bytes that a stage hands on in the largest step: two tensors, as wide as they
        may be.
        """
        tokens = self.scheduler_config.max_num_batched_tokens or 0
        width = 0 if self.config.description is None else self.config.description.hidden_size
        return max(LEAST_MOST, 2 * tokens * width * 4)


def _giving_up(executor: RayLegacyExecutor) -> Callable[[HardpointError], None]:
    """Return a function that fails the group of an executor, without holding the executor."""
    held = weakref.ref(executor)

    def give_up(error: HardpointError) -> None:
        living = held()
        if living is not None:
            living.give_up(error)

    return give_up
