"""The cpu's DeviceOps: host memory, counted as the kernel counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hardpoint_runtime.device import HostDeviceOps, MemoryInfo

from hardpoint_cpu import memory
from hardpoint_cpu.native.program import Program

if TYPE_CHECKING:
    from hardpoint_runtime.model_runner import TorchModelRunner


class CpuDeviceOps(HostDeviceOps):
    """Host memory. What a process holds is what is resident, weights mapped from files included.

    ``workers`` share the host's memory, each an equal part of it. ``native_level``: the
    instructions of native programs.
    """

    def __init__(
        self, workers: int = 1, collectives: str = "auto", native_level: str = "auto"
    ) -> None:
        super().__init__(collectives)
        self.workers = workers
        self.native_level = native_level

    def lower(self, runner: TorchModelRunner) -> Program:
        """Return the model as a native program on as many threads as torch has."""
        return Program.of(runner, self.native_level)

    def memory_info(self) -> MemoryInfo:
        """Return one worker's part of what control groups and the machine leave."""
        host = memory.host_memory()
        return MemoryInfo(free=host.free // self.workers, total=host.total // self.workers)

    def memory_allocated(self) -> int:
        """Return the resident bytes of this process."""
        return memory.resident()

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Return the most resident bytes while ``run()`` ran; where the kernel does not forget the
        earlier peak, that of the whole life.
        """
        memory.forget_peak()
        run()
        return max(memory.resident_peak(), memory.resident())
