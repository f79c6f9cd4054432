"""Communication among ranks by a device's own library, through torch's process groups of it.

An operation is work of the device: it is queued behind what the current stream has, and what comes
later waits for it; the host goes on. A rank that waits for a peer therefore waits where it asks for
values. Ending the group aborts the operations under way, after which the device is free again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from hardpoint.errors import UnsupportedError

from hardpoint_runtime.parallel.communicator import Communicator, Meeting, TensorShape
from hardpoint_runtime.parallel.errors import CollectiveEndedError
from hardpoint_runtime.parallel.groups import Group
from hardpoint_runtime.parallel.host import FILE, StagedCommunicator, host_communicator
from hardpoint_runtime.parallel.process_group import (
    LOOK,
    ProcessGroupCommunicator,
    distributed,
    file_store,
)

if TYPE_CHECKING:
    from hardpoint_runtime.device import DeviceOps

_logger = logging.getLogger("hardpoint.worker")

MakeGroup = Callable[[Any, int, int, float], Any]
"""Makes a process group of (store, index, size, seconds)."""


def device_communicator(
    device: DeviceOps, group: Group, meeting: Meeting, backend: str
) -> Communicator:
    """Return this rank's end of ``group`` by the library that torch calls ``backend``.

    Ranks of several hosts go through host memory, with a warning: torch's libraries would need a
    meeting place of their own, which is on a network and without keys.
    """
    if not meeting.rendezvous.startswith(FILE):
        _logger.warning(
            "group %s has ranks of several hosts: its tensors go through host memory", group
        )
        return StagedCommunicator(host_communicator(group, meeting), device)
    store = file_store(meeting.rendezvous.removeprefix(FILE))
    return DeviceCommunicator(device, group, meeting, store, process_groups(backend))


def process_groups(backend: str) -> MakeGroup:
    """Return what makes process groups of ``backend``. Raises UnsupportedError where torch was
    built without it.
    """
    kind = getattr(distributed, f"ProcessGroup{backend.upper()}", None)
    if kind is None:
        raise UnsupportedError(
            f"communication by {backend}", f"torch {torch.__version__}",
            reason="it was built without that library",
        )  # fmt: skip

    def make(store: Any, index: int, size: int, timeout: float) -> Any:
        options = kind.Options()
        options._timeout = timedelta(seconds=timeout)  # noqa: SLF001 - as torch's own code does
        return kind(store, index, size, options)

    return make


class DeviceCommunicator(ProcessGroupCommunicator):
    """One rank's end of a group, for tensors on ``device``."""

    def __init__(
        self, device: DeviceOps, group: Group, meeting: Meeting, store: Any, make: MakeGroup
    ) -> None:
        self._device = device
        super().__init__(group, meeting, store, make)

    def barrier(self) -> None:
        """Sum a number on the device, and wait for it on the host, as long as a wait may last."""
        number = torch.zeros(1, device=self._device.device)
        work = self._all.allreduce([number])
        deadline = time.monotonic() + self.meeting.timeout
        others = [place for place in range(self.size) if place != self.index]
        while not work.is_completed():
            self.check_wait("barrier", deadline, lambda: others)
            time.sleep(LOOK)
        self._wait("barrier", work)

    def receive(self, shapes: Mapping[str, TensorShape], source: int) -> dict[str, torch.Tensor]:
        """Take part in the sender's broadcasts, into memory of the device."""
        pair, device = self._pair(source, self.index), self._device.device
        return {
            name: self._broadcast("receive", pair, shape.empty(device), 0).wait()
            for name, shape in shapes.items()
        }

    def end(self) -> None:
        """Abort what is under way, so that the device goes on. From any thread."""
        super().end()
        self._abort()

    def close(self) -> None:
        """Leave the groups in order; abort them where an operation failed."""
        if self._broken:
            self._abort()
        else:
            self._each("shutdown")
        super().close()

    def _wait(self, operation: str, work: Any) -> None:
        """Order the current stream behind the operation."""
        if self.meeting.ended.is_set():
            raise CollectiveEndedError(
                "it was ended from outside", group=str(self.group), operation=operation
            )
        try:
            work.wait()
        except RuntimeError as error:
            self._broken = True
            raise self._failure(operation, error) from error

    def _abort(self) -> None:
        self._broken = True
        self._each("abort")

    def _each(self, method: str) -> None:
        for held in (self.__dict__.get("_all"), *self._pairs.values()):
            function = getattr(held, method, None)
            if function is not None:
                with contextlib.suppress(RuntimeError):  # it is gone already
                    function()
