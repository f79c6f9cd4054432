"""Communicators for tensors in host memory, and for a device that has none of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hardpoint.errors import ConfigError, UnsupportedError
from hardpoint.rpc.network.hub import RENDEZVOUS

from hardpoint_runtime.parallel import process_group
from hardpoint_runtime.parallel.communicator import (
    Communicator,
    Meeting,
    Pending,
    Tensor,
    TensorShape,
)
from hardpoint_runtime.parallel.groups import Group
from hardpoint_runtime.parallel.network import HostsCommunicator
from hardpoint_runtime.parallel.shared_memory import SharedMemoryCommunicator

if TYPE_CHECKING:
    from hardpoint_runtime.device import DeviceOps

KINDS = ("shared_memory", "gloo")
"""Ways to communicate among host processes."""

FILE = "file://"


def host_communicator(group: Group, meeting: Meeting, kind: str = "auto") -> Communicator:
    """Return this rank's end of ``group``; waits until all members have come.

    ``auto`` is shared memory on Linux, where it takes a tenth of gloo's time, else gloo, as across
    hosts. Raises UnsupportedError for another kind of rendezvous, ConfigError for an unknown kind.
    """
    auto = kind == "auto"
    if auto:
        kind = "shared_memory" if sys.platform == "linux" else "gloo"
    if kind not in KINDS:
        raise ConfigError(f"no collectives of kind {kind!r}; there are auto, {', '.join(KINDS)}")
    if meeting.rendezvous.startswith(RENDEZVOUS):
        if kind == "shared_memory" and not auto:
            raise ConfigError("collectives of kind 'shared_memory' are for one host; take gloo")
        return HostsCommunicator(group, meeting)
    if not meeting.rendezvous.startswith(FILE):
        raise UnsupportedError(
            f"the rendezvous {meeting.rendezvous!r}",
            "hardpoint-runtime",
            reason="its ranks share a file, of one host",
        )
    path = meeting.rendezvous.removeprefix(FILE)
    if kind == "shared_memory":
        return SharedMemoryCommunicator(group, meeting, path)
    store = process_group.file_store(path)
    return process_group.ProcessGroupCommunicator(group, meeting, store, process_group.gloo)


class StagedCommunicator(Communicator):
    """Takes tensors of a device through host memory. For devices without collectives of their own:
    right, and slow.
    """

    def __init__(self, host: Communicator, device: DeviceOps) -> None:
        super().__init__(host.group, host.meeting)
        self._host = host
        self._device = device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum on the host."""
        return self._back(self._host.all_reduce(self._out(tensor)))

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """Gather on the host."""
        return self._back(self._host.all_gather(self._out(tensor), sizes, dim))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast on the host."""
        tensor.copy_(self._host.broadcast(self._out(tensor), source))
        return tensor

    def barrier(self) -> None:
        """Wait for the device's work, then for the peers."""
        self._device.synchronize()
        self._host.barrier()

    def send(self, tensors: Mapping[str, Tensor], to: int) -> Pending:
        """Send copies on the host."""
        return self._host.send({name: self._out(each) for name, each in tensors.items()}, to)

    def receive(self, shapes: Mapping[str, TensorShape], source: int) -> dict[str, Tensor]:
        """Receive on the host, then copy to the device."""
        received = self._host.receive(shapes, source)
        return {name: self._back(tensor) for name, tensor in received.items()}

    def end(self) -> None:
        """End the host's group."""
        self._host.end()

    def close(self) -> None:
        """Leave the host's group."""
        self._host.close()

    def _out(self, tensor: Tensor) -> Tensor:
        host = self._device.to_host(tensor)
        return host.clone() if host is tensor else host

    def _back(self, tensor: Tensor) -> Tensor:
        return self._device.to_device(tensor, tensor.dtype)
