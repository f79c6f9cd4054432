"""The port to a unit, and the exchange between units."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hardpoint_runtime.device import MemoryInfo, TorchDeviceOps
from hardpoint_runtime.parallel.communicator import Communicator, Meeting
from hardpoint_runtime.parallel.groups import Group
from hardpoint_runtime.parallel.host import StagedCommunicator, host_communicator

from hardpoint_acme import torch_backend

SCRATCH = 64 << 20
"""Bytes that a step takes beside weights and cache; a device with counters of its own would say."""


class AcmeDeviceOps(TorchDeviceOps):
    """Counts what the host reads of the device: ``reads``."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(torch_backend.NAME, 0)
        self.memory_bytes = memory_bytes
        self.reads = 0

    def memory_info(self) -> MemoryInfo:
        """Return the memory that the setting gives a unit."""
        free = self.memory_bytes - self.memory_allocated()
        return MemoryInfo(free=max(0, free), total=self.memory_bytes)

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Return what is held after ``run()``, and a step's scratch."""
        run()
        return self.memory_allocated() + SCRATCH

    def allocate(self, num_bytes: int, tag: str) -> torch.Tensor:
        """Return zeroed memory; raise OutOfMemoryError where the unit has less."""
        free = self.memory_info().free
        if num_bytes > free:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes for {tag}, {free} are free")
        return super().allocate(num_bytes, tag)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count, and copy."""
        self.reads += isinstance(tensor, torch_backend.AcmeTensor)
        return super().to_host(tensor)

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """Return this unit's end of ``group``: units meet in host memory."""
        return UnitCommunicator(host_communicator(group, meeting), self)


class UnitCommunicator(StagedCommunicator):
    """Counts the sums: ``reductions``."""

    reductions = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum on the host."""
        self.reductions += 1
        return super().all_reduce(tensor)
