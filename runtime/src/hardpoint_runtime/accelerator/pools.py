"""Memory that can sleep and keeps its addresses: pools by tag, over a device's virtual memory.

A piece is a range of addresses with memory behind it. Asleep, it is the range alone; awake again,
it has other memory at the same addresses. So every tensor stays what it was, and whatever knows an
address, as captured graphs do, stays right.

How tensors get here is :mod:`hardpoint_runtime.accelerator.placed_pools`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from attrs import define
from hardpoint.records import SleepReport

from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory

HostBuffer = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Returns host memory from which copies to the device are fastest."""


@define(eq=False)
class Piece:
    """One range of addresses: ``num_bytes`` from ``address``, under ``tag``. ``backup`` is what it
    holds while it sleeps, None where that is lost.
    """

    tag: str
    address: int
    num_bytes: int
    mapped: bool = True
    backup: torch.Tensor | None = None


class AddressKeepingPools:
    """Every piece of one device by tag. Built by ``AcceleratorDeviceOps.make_pools``.

    ``synchronize`` waits for the device's work; called before memory is taken from under it.
    ``give_back`` returns to the device what torch's allocator keeps and no tensor uses; called
    where there is no memory else.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        host_buffer: HostBuffer,
        synchronize: Callable[[], None],
        give_back: Callable[[], None],
    ) -> None:
        self.memory = memory
        self._host_buffer = host_buffer
        self._synchronize = synchronize
        self._give_back = give_back
        self._pieces: dict[int, Piece] = {}
        self._lock = threading.RLock()
        """Taken again by its own thread where a collection of garbage within ends a tensor."""

    def use(self, tag: str) -> contextlib.AbstractContextManager[object]:
        """Return a context in which tensors are made in the pool of ``tag``, on this thread.

        Here: none; :class:`~hardpoint_runtime.accelerator.placed_pools.PlacedPools` brings it.
        """
        raise NotImplementedError

    def take_in(self, tag: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Have tensors of the device that lie elsewhere belong to ``tag``; those of one piece of
        memory still share one. Return those with which that cannot be. Here: all.
        """
        return dict(tensors)

    def allocate(self, tag: str, num_bytes: int) -> int:
        """Return the address of new memory. Raises torch.OutOfMemoryError."""
        size = self.rounded(num_bytes)
        address = self.memory.reserve(size)
        try:
            self._map(address, size)
        except BaseException:
            self.memory.release(address, size)
            raise
        with self._lock:
            self._pieces[address] = Piece(tag=tag, address=address, num_bytes=size)
        return address

    def free(self, address: int) -> None:
        """Give a piece back, awake or asleep, once the work on it is done: taking memory away does
        not wait by itself.
        """
        with self._lock:
            piece = self._pieces.pop(address)
        if piece.mapped:
            self._synchronize()
            self.memory.unmap(piece.address, piece.num_bytes)
        self.memory.release(piece.address, piece.num_bytes)

    @property
    def rounding(self) -> int:
        """The most bytes that an allocation takes beyond what was asked for."""
        return self.memory.granularity

    def close(self) -> None:
        """Forget what is needed for later tensors only. Called when the worker shuts down."""

    def rounded(self, num_bytes: int) -> int:
        """Return what a piece of at least ``num_bytes`` takes."""
        unit = self.memory.granularity
        return -(-max(num_bytes, 1) // unit) * unit

    def held(self, tags: Iterable[str] | None = None) -> int:
        """Return the bytes that pieces (of ``tags``) hold of the device now."""
        return sum(piece.num_bytes for piece in self._of(tags) if piece.mapped)

    @property
    def asleep(self) -> int:
        """The bytes of pieces that have no memory now."""
        return sum(piece.num_bytes for piece in self._of(None) if not piece.mapped)

    def sleep(self, tags: Collection[str], keep: Collection[str] = ()) -> SleepReport:
        """Take the memory from behind the pieces of ``tags``; those also in ``keep`` are copied to
        the host first. Pieces that sleep already are left as they are, but for a backup that is not
        to be kept.

        All copies are made before anything is given back: a host without memory leaves all awake.
        """
        self._synchronize()
        pieces = self._of(tags)
        backups = {
            piece.address: self._copied(piece)
            for piece in pieces
            if piece.mapped and piece.tag in keep
        }
        freed = 0
        for piece in pieces:
            if piece.mapped:
                piece.backup = backups.get(piece.address)
                self.memory.unmap(piece.address, piece.num_bytes)
                piece.mapped = False
                freed += piece.num_bytes
            elif piece.tag not in keep:
                piece.backup = None
        kept = sum(backup.numel() for backup in backups.values())
        return SleepReport(bytes_freed=freed, bytes_backed_up=kept, bytes_still_held=self.held())

    def wake(self, tags: Collection[str]) -> SleepReport:
        """Put memory behind the pieces of ``tags`` again, with what was kept of them; of the others
        the contents are undefined.

        Raises torch.OutOfMemoryError if the device has not enough; calling it again goes on.
        """
        for piece in self._of(tags):
            if not piece.mapped:
                self._map(piece.address, piece.num_bytes)
                piece.mapped = True
            if piece.backup is not None:
                self.memory.write(piece.address, piece.backup)
                piece.backup = None
        return SleepReport(bytes_freed=0, bytes_backed_up=0, bytes_still_held=self.held())

    def _map(self, address: int, num_bytes: int) -> None:
        try:
            self.memory.map(address, num_bytes)
        except torch.OutOfMemoryError:
            self._give_back()
            self.memory.map(address, num_bytes)

    def _of(self, tags: Iterable[str] | None) -> list[Piece]:
        wanted = None if tags is None else set(tags)
        with self._lock:
            pieces = list(self._pieces.values())
        return [piece for piece in pieces if wanted is None or piece.tag in wanted]

    def _copied(self, piece: Piece) -> torch.Tensor:
        backup = self._host_buffer((piece.num_bytes,), torch.uint8)
        self.memory.read(piece.address, backup)
        return backup
