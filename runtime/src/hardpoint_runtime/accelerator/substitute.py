"""Host memory in the place of a device, so that a plugin's worker and runner can be tried without
one: the key ``plugins.NAME.substitute``. It says nothing of a device's own behaviour.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from hardpoint.errors import ConfigError

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.host_memory import HostVirtualMemory
from hardpoint_runtime.accelerator.settings import OFF, AcceleratorSettings
from hardpoint_runtime.device import HostDeviceOps, MemoryInfo

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group

PROCESS = Path("/proc/self")


class SubstituteDeviceOps(AcceleratorDeviceOps):
    """``count`` devices of ``num_bytes`` each, made of host memory. What is used is what the
    process has in memory, so never less than a device would; work is done when a call returns.
    """

    def __init__(self, count: int, num_bytes: int, index: int = 0, *, sleeps: bool = True) -> None:
        super().__init__("cpu", 0, pins=False, sleeps=sleeps)
        self.device = torch.device("cpu")
        self.index = index
        self._count = count
        self._num_bytes = num_bytes

    @classmethod
    def of(cls, settings: AcceleratorSettings, index: int) -> Self:
        """Return the device ``index`` of what the settings of a plugin describe."""
        sleeps = settings.sleep != OFF
        return cls(settings.substitute_devices, settings.substitute_bytes, index, sleeps=sleeps)

    def count(self) -> int:
        """Return what the settings say."""
        return self._count

    def set_device(self) -> None:
        """Refuse what a device would: host memory itself is always at hand."""
        if self.index >= self._count:
            raise ConfigError(
                f"device {self.index} is asked for (by the key devices, or as the worker of that "
                f"number on this host), and the substitute has {self._count}"
            )

    def seed(self, seed: int) -> None:
        """Seed torch's default generator, which is this device's."""
        torch.default_generator.manual_seed(seed)

    def memory_info(self) -> MemoryInfo:
        """Return what the settings say, less what is used."""
        return MemoryInfo(
            free=max(0, self._num_bytes - self.memory_allocated()), total=self._num_bytes
        )

    def memory_allocated(self) -> int:
        """Return the resident bytes of this process; what sleeps is not among them."""
        return _resident("VmRSS")

    def memory_reserved(self) -> int:
        """Return the same: nothing is kept aside."""
        return self.memory_allocated()

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Return the most resident bytes while ``run()`` ran; where the kernel does not forget the
        earlier peak, that of the whole life.
        """
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")
        run()
        return max(_resident("VmHWM"), _resident("VmRSS"))

    def allocate(self, num_bytes: int, tag: str) -> torch.Tensor:
        """Raises MemoryError where the host does not give that much: torch's allocator has an error
        of its own for that.
        """
        try:
            return super().allocate(num_bytes, tag)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def empty_cache(self) -> None:
        """Do nothing."""

    def make_virtual_memory(self) -> VirtualMemory:
        """Build a port to pages of the host."""
        return HostVirtualMemory()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def synchronize(self) -> None:
        """Do nothing: no work is ever outstanding."""

    def stream(self) -> Any:
        """Raise UnsupportedError: host memory has none."""
        self._unsupported("streams")

    def event(self) -> Any:
        """Raise UnsupportedError: host memory has none."""
        self._unsupported("events")

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """As host memory does."""
        return HostDeviceOps().make_communicator(group, meeting)


def _resident(name: str) -> int:
    """Return the bytes of a line of the process's status."""
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
