"""The worker of the simulated accelerator."""

from __future__ import annotations

import simulated_device
from hardpoint_runtime.device import TorchDeviceOps
from hardpoint_runtime.worker import TorchWorker


class SimulatedDeviceOps(TorchDeviceOps):
    """The port, counting what it reads."""

    reads = 0

    def to_host(self, tensor):
        type(self).reads += isinstance(tensor, simulated_device.SimulatedTensor)
        return super().to_host(tensor)


class SimulatedWorker(TorchWorker):
    def make_device(self):
        simulated_device.install()
        return SimulatedDeviceOps(simulated_device.NAME, self.context.local_rank)
