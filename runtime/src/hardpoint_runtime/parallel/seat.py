"""A rank's seat in the world: what it holds of the model, and its lines to the other ranks.

A model is built with a seat, and asks it for its share of everything. ALONE, the seat of a single
worker, has all and communicates with nobody, so that models are written once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import Factory, field, frozen
from hardpoint.errors import ConfigError, HardpointError

from hardpoint_runtime.parallel import spans
from hardpoint_runtime.parallel.carried import CarriedLine
from hardpoint_runtime.parallel.communicator import Communicator, Meeting
from hardpoint_runtime.parallel.groups import Axis, Group, Place, Topology
from hardpoint_runtime.parallel.spans import Heads, Span

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.records import WorkerContext

    from hardpoint_runtime.device import DeviceOps


@frozen(kw_only=True, eq=False)
class Seat:
    """One rank of a topology. ``tensor`` and ``pipeline`` are its groups along these axes, None
    where it is alone there; ``place`` is where it is along each.
    """

    topology: Topology = field(factory=Topology)
    rank: int = 0
    tensor: Communicator | None = None
    pipeline: Communicator | None = None
    place: Place = field(
        init=False,
        default=Factory(lambda self: self.topology.place_of(self.rank), takes_self=True),
    )

    @property
    def is_alone(self) -> bool:
        """Whether one rank has the whole model."""
        return self.topology.size == 1

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage has the embedding."""
        return self.place.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage has the last norm and the output projection, and samples."""
        return self.place.pipeline == self.topology.pipeline - 1

    def share(self, total: int) -> Span:
        """Return this tensor shard's part of ``total`` rows or columns."""
        return spans.share(total, self.place.tensor, self.topology.tensor)

    def shares(self, total: int) -> tuple[Span, ...]:
        """Return every tensor shard's part."""
        return spans.shares(total, self.topology.tensor)

    def heads(self, description: ModelDescription) -> Heads:
        """Return this tensor shard's attention heads. Raises ConfigError if they cannot be
        shared.
        """
        return spans.heads(
            description.num_heads,
            description.num_kv_heads,
            self.place.tensor,
            self.topology.tensor,
        )

    def layers(self, description: ModelDescription) -> Span:
        """Return this stage's layers; the first stages have one more. Raises ConfigError for more
        stages than layers.
        """
        stages = self.topology.pipeline
        if stages > max(1, description.num_layers):
            raise ConfigError(
                f"pipeline_parallel_size = {stages}: more stages than the model's "
                f"{description.num_layers} layers"
            )
        return spans.share(description.num_layers, self.place.pipeline, stages)

    def end(self) -> None:
        """Release whoever waits in a group of this rank; from any thread."""
        for group in (self.tensor, self.pipeline):
            if group is not None:
                group.end()

    def close(self) -> None:
        """Leave the groups."""
        for group in (self.tensor, self.pipeline):
            if group is not None:
                group.close()


ALONE = Seat()
"""The seat of a single worker."""


def take_seat(context: WorkerContext, device: DeviceOps, ended: threading.Event) -> Seat:
    """Join the groups of this rank; returns when all their members have.

    Called by ``TorchWorker.join_group``. ``ended`` is set when the collectives of this rank are
    ended. Raises ConfigError for a world that is not the configuration's, or without a rendezvous.
    """
    parallel = context.config.parallel
    topology = Topology.of(parallel)
    if topology.size != context.world_size:
        raise ConfigError(
            f"{context.world_size} workers for tensor_parallel_size = "
            f"{parallel.tensor_parallel_size} and pipeline_parallel_size = "
            f"{parallel.pipeline_parallel_size}, which need {topology.size}"
        )
    if topology.size == 1:
        return ALONE
    if context.rendezvous is None:
        raise HardpointError(
            f"rank {context.rank}: the executor gave its {context.world_size} workers no rendezvous"
        )
    meeting = Meeting(
        rank=context.rank,
        rendezvous=context.rendezvous,
        timeout=parallel.collective_timeout,
        cancelled=context.cancelled,
        ended=ended,
        spin=context.config.rpc.spin_us * 1e-6,
    )
    groups = [topology.group_of(axis, context.rank) for axis in (Axis.TENSOR, Axis.PIPELINE)]

    def join(group: Group) -> Communicator:
        if group.axis is Axis.PIPELINE and context.stages is not None:
            return CarriedLine(group, meeting, context.stages, device)
        return device.make_communicator(group, meeting)

    tensor, pipeline = _joined(groups, join)
    return Seat(topology=topology, rank=context.rank, tensor=tensor, pipeline=pipeline)


def _joined(
    groups: list[Group], join: Callable[[Group], Communicator]
) -> list[Communicator | None]:
    """Join those of more than one member; leave all if one cannot be joined."""
    made: list[Communicator | None] = []
    with contextlib.ExitStack() as leave:
        for group in groups:
            communicator = join(group) if len(group.ranks) > 1 else None
            if communicator is not None:
                leave.callback(communicator.close)
            made.append(communicator)
        leave.pop_all()
    return made
