"""A Communicator over one of torch's process groups, made for itself alone: nothing is registered
with torch.distributed, so that several ranks and engines can live in one process.

With gloo, the only library for host memory that torch brings, these were found (torch 2.13):

* ``abort`` and ``shutdown`` do nothing; dropping the group waits for the operation in flight. So a
  wait here asks again and again, leaves when it must, and a group that was left in the middle of an
  operation is dropped on a thread of its own.
* A wait for ``recv`` that times out breaks the connection, and ``is_completed`` of one is never
  true. Point to point is therefore a broadcast in a group of the two.
* A peer whose process ends is noticed at once, by its connection.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hardpoint_runtime.parallel.communicator import (
    Communicator,
    Meeting,
    Pending,
    TensorShape,
)
from hardpoint_runtime.parallel.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
)
from hardpoint_runtime.parallel.groups import Axis, Group

Tensor = torch.Tensor
distributed: Any = importlib.import_module("torch.distributed")  # its types hide what is used here

LOOK = 20e-3
"""Seconds between two looks at what else may end a wait."""


class ProcessGroupCommunicator(Communicator):
    """One rank's end. ``make(store, index, size, timeout)`` makes a process group of a backend;
    ``store`` is one of torch's stores that all members share.
    """

    def __init__(
        self,
        group: Group,
        meeting: Meeting,
        store: Any,
        make: Callable[[Any, int, int, float], Any],
    ) -> None:
        super().__init__(group, meeting)
        self._store = store
        self._make = make
        self._broken = False
        self._pairs: dict[tuple[int, int], Any] = {}
        try:
            self._all = self._join("all", self.index, self.size)
            if group.axis is Axis.PIPELINE:  # so that the first send waits for nobody
                for place in range(max(0, self.index - 1), min(self.size - 1, self.index + 1)):
                    self._pair(place, place + 1)
            self.barrier()
        except BaseException:
            self.close()
            raise

    def _join(self, name: str, index: int, size: int) -> Any:
        store = distributed.PrefixStore(f"{self.group.name}/{name}/", self._store)
        try:
            return self._make(store, index, size, self.meeting.timeout)
        except RuntimeError as error:
            raise self._failure("join", error) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum; 16-bit numbers in float32."""
        narrow = tensor.is_floating_point() and tensor.itemsize < 4
        total = tensor.float() if narrow else tensor.contiguous()
        self._wait("all_reduce", self._all.allreduce([total]))
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """Exchange padded to the largest, since the library wants equal sizes."""
        dim %= tensor.dim()
        shape, largest = list(tensor.shape), max(sizes)
        shape[dim] = largest
        mine = tensor.contiguous()
        if tensor.shape[dim] < largest:
            mine = tensor.new_zeros(shape)
            mine.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [tensor.new_empty(shape) for _ in sizes]
        self._wait("all_gather", self._all.allgather([parts], [mine]))
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """As the library does."""
        return self._broadcast("broadcast", self._all, tensor, source).wait()

    def barrier(self) -> None:
        """Sum a number: the library's barrier has no wait that can be left."""
        self._wait("barrier", self._all.allreduce([torch.zeros(1)]))

    def send(self, tensors: Mapping[str, Tensor], to: int) -> Pending:
        """Start a broadcast for each tensor."""
        pair = self._pair(self.index, to)
        return _Works([self._broadcast("send", pair, each, 0) for each in tensors.values()])

    def receive(self, shapes: Mapping[str, TensorShape], source: int) -> dict[str, Tensor]:
        """Take part in the sender's broadcasts."""
        pair = self._pair(source, self.index)
        return {
            name: self._broadcast("receive", pair, shape.empty(), 0).wait()
            for name, shape in shapes.items()
        }

    def _pair(self, source: int, to: int) -> Any:
        """Return the group of the two, made when both first need it."""
        key = source, to
        if key not in self._pairs:
            self._pairs[key] = self._join(f"{source}-{to}", int(self.index == to), 2)
        return self._pairs[key]

    def _broadcast(self, operation: str, group: Any, tensor: Tensor, source: int) -> _Work:
        options = distributed.BroadcastOptions()
        options.rootRank = source
        tensor = tensor.contiguous()
        return _Work(self, operation, group.broadcast([tensor], options), tensor)

    def _wait(self, operation: str, work: Any) -> None:
        deadline = time.monotonic() + self.meeting.timeout
        others = [place for place in range(self.size) if place != self.index]
        try:
            while not self._is_done(operation, work):
                self.check_wait(operation, deadline, lambda: others)
        except BaseException:
            self._broken = True
            raise

    def _is_done(self, operation: str, work: Any) -> bool:
        """Wait for a moment; raise what the operation failed with, if it did."""
        with contextlib.suppress(RuntimeError):  # out of time, or the operation's own error
            work.wait(timedelta(seconds=LOOK))
            return True
        if not work.is_completed():
            return False
        try:
            work.wait()  # it may have succeeded since
        except RuntimeError as error:
            raise self._failure(operation, error) from error
        return True

    def _failure(self, operation: str, error: RuntimeError) -> CollectiveError:
        text = str(error).splitlines()[0]
        lowered = text.lower()
        kind = CollectiveError
        if "connection" in lowered:
            kind = PeerLostError
        elif "timed out" in lowered or "timeout" in lowered:
            kind = CollectiveTimeoutError
        return kind(text, group=str(self.group), operation=operation)

    def close(self) -> None:
        """Drop the groups; those left in the middle of an operation on a thread of its own, which
        waits for the library to give up.
        """
        held = [self.__dict__.pop("_all", None), *self._pairs.values(), self._store]
        self._pairs, self._store = {}, None
        if self._broken:
            threading.Thread(target=held.clear, name="hardpoint-drop-group", daemon=True).start()


class _Work(Pending):
    """One operation of the library under way, and the tensor that it uses."""

    def __init__(
        self, owner: ProcessGroupCommunicator, operation: str, work: Any, tensor: Tensor
    ) -> None:
        self._owner = owner
        self._operation = operation
        self._work = work
        self._tensor = tensor

    def wait(self) -> Tensor:  # type: ignore[override]
        """Return the tensor when the operation is done."""
        self._owner._wait(self._operation, self._work)  # noqa: SLF001
        return self._tensor


class _Works(Pending):
    """Several, awaited together."""

    def __init__(self, works: Sequence[_Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are done."""
        for work in self._works:
            work.wait()


def gloo(store: Any, index: int, size: int, timeout: float, host: str = "127.0.0.1") -> Any:
    """Make a process group of gloo that listens at the address ``host`` only: the loopback's, for
    one host.
    """
    kind = distributed.ProcessGroupGloo
    options = kind._Options()  # noqa: SLF001 - the only way to a group of one's own
    options._timeout = timedelta(seconds=timeout)  # noqa: SLF001
    options._devices = [kind.create_device(hostname=host)]  # noqa: SLF001
    options._threads = 1  # noqa: SLF001
    return kind(store, index, size, options)


def file_store(path: str) -> Any:
    """Return torch's store in a file that all ranks share and nobody removes.

    The store opens its file by name at each use, and writes once more at its own end, whenever the
    library lets go of it; a name as ``/proc/self/fd/N`` may mean another file by then. So it gets a
    descriptor of its own, which stays open as long as the process lives.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    own = Path(f"/proc/self/fd/{descriptor}")
    return distributed.FileStore(str(own) if own.exists() else path)
