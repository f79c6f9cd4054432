"""Which ranks belong together: pure arithmetic, the same in the driver and in every worker.

Along the ranks tensor shards change fastest, then context shards, then pipeline stages, then copies
of the model::

    rank = ((copy * stages + stage) * context + context_shard) * tensor + tensor_shard
"""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Self

from attrs import frozen
from hardpoint.config.schema import ParallelConfig
from hardpoint.errors import ConfigError


class Axis(Enum):
    """What the members of a group share: all but their place along this axis."""

    WORLD = "world"
    TENSOR = "tensor"
    CONTEXT = "context"
    PIPELINE = "pipeline"
    DATA = "data"
    EXPERT = "expert"


@frozen(kw_only=True)
class Place:
    """One rank by its place along each axis, counted from 0."""

    tensor: int = 0
    context: int = 0
    pipeline: int = 0
    data: int = 0


@frozen(kw_only=True)
class Group:
    """Ranks of the world that communicate, in the order of their place along ``axis``."""

    axis: Axis
    index: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """A name that no other group of the world has, for messages and rendezvous."""
        return f"{self.axis.value}-{self.index}"

    def __str__(self) -> str:
        return f"{self.name} (ranks {', '.join(map(str, self.ranks))})"


@frozen(kw_only=True)
class Topology:
    """How many shards, stages and copies there are; 1 along an axis means that it is not split."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1

    def __attrs_post_init__(self) -> None:
        for axis in ("tensor", "context", "pipeline", "data"):
            if (size := getattr(self, axis)) < 1:
                raise ConfigError(f"a world of {size} along the axis {axis}: it must be at least 1")

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """Return the topology of one copy of the model, as the configuration says: copies have
        executors of their own.
        """
        return cls(tensor=parallel.tensor_parallel_size, pipeline=parallel.pipeline_parallel_size)

    @property
    def size(self) -> int:
        """Ranks in the world."""
        return self.tensor * self.context * self.pipeline * self.data

    def place_of(self, rank: int) -> Place:
        """Return where ``rank`` is. Raises ConfigError for one outside the world."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank {rank} is not in a world of {self.size}")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        data, pipeline = divmod(rest, self.pipeline)
        return Place(tensor=tensor, context=context, pipeline=pipeline, data=data)

    def rank_of(self, place: Place) -> int:
        """Return the rank at ``place``."""
        row = (place.data * self.pipeline + place.pipeline) * self.context + place.context
        return row * self.tensor + place.tensor

    def groups(self, axis: Axis) -> tuple[Group, ...]:
        """Return every group along ``axis``; each rank is in exactly one."""
        moving = _MOVING[axis]
        sizes = {name: getattr(self, name) for name in ("data", "pipeline", "context", "tensor")}
        fixed = [range(1) if name in moving else range(size) for name, size in sizes.items()]
        free = [range(size) if name in moving else range(1) for name, size in sizes.items()]
        return tuple(
            Group(
                axis=axis,
                index=index,
                ranks=tuple(
                    self.rank_of(
                        Place(**{n: a + b for n, a, b in zip(sizes, base, step, strict=True)})
                    )
                    for step in product(*free)
                ),
            )
            for index, base in enumerate(product(*fixed))
        )

    def group_of(self, axis: Axis, rank: int) -> Group:
        """Return the group along ``axis`` that ``rank`` is in."""
        self.place_of(rank)
        return next(group for group in self.groups(axis) if rank in group.ranks)


_MOVING = {
    Axis.WORLD: ("tensor", "context", "pipeline", "data"),
    Axis.TENSOR: ("tensor",),
    Axis.CONTEXT: ("context",),
    Axis.PIPELINE: ("pipeline",),
    Axis.DATA: ("data",),
    Axis.EXPERT: ("tensor", "context", "data"),  # the experts of one stage
}
