"""The Communicator contract: how the ranks of one group exchange tensors.

One object a group and rank, made by ``DeviceOps.make_communicator`` when the worker joins its
groups, used on the worker's thread; only :meth:`Communicator.end` may be called from another. All
members call the same operations in the same order with matching sizes. Nothing global is touched,
so that several ranks, and several engines, can live in one process.

Every wait ends: with the peers' arrival; with CancelledStepError when the driver wants the worker
to leave; with CollectiveEndedError after :meth:`Communicator.end`; with PeerLostError when a peer's
process is gone; with CollectiveTimeoutError when nobody came in time. After an error the group
cannot be used again.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import field, frozen
from hardpoint.errors import CancelledStepError

from hardpoint_runtime.parallel.errors import (
    CollectiveEndedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from hardpoint_runtime.parallel.groups import Group

Tensor = torch.Tensor


@frozen(kw_only=True)
class TensorShape:
    """What a tensor that is to come looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return uninitialised memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@frozen(kw_only=True)
class Meeting:
    """How one rank finds its peers, and what ends its waits.

    ``rendezvous`` is the address from ``WorkerContext.rendezvous``. ``timeout`` is in seconds, for
    one operation. ``cancelled()`` turns true when the driver wants this worker to leave. ``ended``
    is set by ``Communicator.end`` of any of this rank's groups: they end together. ``spin`` is for
    how many seconds a wait yields the processor before it sleeps.
    """

    rank: int
    rendezvous: str
    timeout: float = 300.0
    cancelled: Callable[[], bool] = field(default=lambda: False, eq=False, repr=False)
    ended: threading.Event = field(factory=threading.Event, eq=False, repr=False)
    spin: float = 200e-6
    shared: dict[str, Any] = field(factory=dict, eq=False, repr=False)
    """What the groups of this rank have in common, by name."""


class Pending(ABC):
    """Tensors on their way to a peer."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the tensors may be changed; raises as any operation of the group."""


class Sent(Pending):
    """They were copied already."""

    def wait(self) -> None:
        """Return at once."""


class Communicator(ABC):
    """One rank's end of a group. ``index`` is its place in ``group.ranks``; roots and peers are
    given by such places.
    """

    def __init__(self, group: Group, meeting: Meeting) -> None:
        self.group = group
        self.meeting = meeting
        self.index = group.ranks.index(meeting.rank)
        self.size = len(group.ranks)

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all members, the same bits on each, in the dtype of ``tensor``, whose
        own memory may be used for it.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """Return the members' tensors side by side along ``dim``, along which member i has
        ``sizes[i]``; they agree in every other dimension.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of member ``source``; the others give one of its shape and dtype, which
        is overwritten.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every member has come here."""

    @abstractmethod
    def send(self, tensors: Mapping[str, Tensor], to: int) -> Pending:
        """Send named tensors to member ``to``, without waiting for it to receive them."""

    @abstractmethod
    def receive(self, shapes: Mapping[str, TensorShape], source: int) -> dict[str, Tensor]:
        """Return the named tensors that member ``source`` sent; ``shapes`` must be theirs, in the
        same order.
        """

    def gather(
        self, tensor: Tensor, sizes: Sequence[int], root: int, dim: int = 0
    ) -> Tensor | None:
        """Return on member ``root`` what :meth:`all_gather` returns, None on the others."""
        gathered = self.all_gather(tensor, sizes, dim)
        return gathered if self.index == root else None

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Return, of every member's ``tensor`` [size * n, ...], this member's n rows, in the order
        of the members: [size * n, ...].
        """
        rows = tensor.shape[0]
        gathered = self.all_gather(tensor, [rows] * self.size)
        parts = gathered.view(self.size, self.size, rows // self.size, *tensor.shape[1:])
        return parts[:, self.index].reshape(tensor.shape)

    def end(self) -> None:
        """Release whoever waits in this group, on this rank and, where they can be reached, on the
        others; from any thread. The group cannot be used afterwards.
        """
        self.meeting.ended.set()

    @abstractmethod
    def close(self) -> None:
        """Leave the group and give everything back. Idempotent."""

    # For implementations.

    def check_wait(
        self,
        operation: str,
        deadline: float,
        missing: Callable[[], Sequence[int]],
        lost: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Raise if a wait must end. ``missing()`` and ``lost()`` return places of members that have
        not come, and that never will. Called every few milliseconds of a wait.
        """
        group = str(self.group)
        if self.meeting.ended.is_set():
            raise CollectiveEndedError(
                "it was ended from outside", group=group, operation=operation
            )
        if self.meeting.cancelled():
            raise CancelledStepError(
                f"{operation} in group {self.group} was ended by the driver, waiting for "
                f"{_named(self._ranks(missing()))}"
            )
        if gone := self._ranks(lost()):
            raise PeerLostError(
                f"{_named(gone)} ended, or left", group=group, operation=operation, ranks=gone
            )
        if time.monotonic() > deadline:
            late = self._ranks(missing())
            raise CollectiveTimeoutError(
                f"{_named(late)} did not come within {self.meeting.timeout:g} s",
                group=group,
                operation=operation,
                ranks=late,
            )

    def mismatch(self, operation: str, peer: int, detail: str) -> NoReturn:
        """Raise for a member that came with another operation."""
        rank = self.group.ranks[peer]
        raise CollectiveMismatchError(
            f"rank {rank} {detail}", group=str(self.group), operation=operation, ranks=(rank,)
        )

    def _ranks(self, places: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.group.ranks[place] for place in places)


def _named(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}" if ranks else "its peers"
