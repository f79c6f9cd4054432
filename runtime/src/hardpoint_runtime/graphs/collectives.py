"""Collectives inside graphs: each is one operation of a recording, whatever it does within.

Graphs of a device take its own collectives in by themselves; for them these calls go through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve
from torch import Tensor

from hardpoint_runtime.graphs.recording import opaque
from hardpoint_runtime.parallel.communicator import Communicator, Pending, TensorShape
from hardpoint_runtime.parallel.seat import Seat


def recordable(seat: Seat) -> Seat:
    """Return the seat with collectives of its tensor group that recordings see. Given to models by
    the runner, where steps run through graphs.

    What pipeline stages send and receive is outside of graphs.
    """
    if seat.tensor is None:
        return seat
    return evolve(seat, tensor=RecordableCommunicator(seat.tensor))


class RecordableCommunicator(Communicator):
    """Another communicator, its collectives recorded whole. All ranks replay the same ones in the
    same order, as all are given the same steps.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.group, inner.meeting)
        self._inner = inner

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        out: Tensor = opaque(self._inner.all_reduce, tensor)
        return out

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """See :class:`Communicator`."""
        out: Tensor = opaque(self._inner.all_gather, tensor, tuple(sizes), dim)
        return out

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """See :class:`Communicator`."""
        out: Tensor = opaque(self._inner.broadcast, tensor, source)
        return out

    def barrier(self) -> None:
        """See :class:`Communicator`."""
        opaque(self._inner.barrier)

    def send(self, tensors: Mapping[str, Tensor], to: int) -> Pending:
        """See :class:`Communicator`; not recorded."""
        return self._inner.send(tensors, to)

    def receive(self, shapes: Mapping[str, TensorShape], source: int) -> dict[str, Tensor]:
        """See :class:`Communicator`; not recorded."""
        return self._inner.receive(shapes, source)

    def end(self) -> None:
        """See :class:`Communicator`."""
        self._inner.end()

    def close(self) -> None:
        """See :class:`Communicator`."""
        self._inner.close()
