"""What accelerators share, over the device of ``hardpoint-acme``: no more than its name is said."""

from __future__ import annotations

from hardpoint_acme import torch_backend
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.model_runner import AcceleratorModelRunner
from hardpoint_runtime.accelerator.worker import AcceleratorWorker


class UnitDeviceOps(AcceleratorDeviceOps):
    """Counts what the host reads of the device: ``reads``."""

    reads = 0

    def to_host(self, tensor):
        self.reads += isinstance(tensor, torch_backend.AcmeTensor)
        return super().to_host(tensor)


class UnitWorker(AcceleratorWorker):
    """One rank, with the runner of accelerators."""

    def make_device(self):
        torch_backend.install()
        return UnitDeviceOps(torch_backend.NAME, self.device_index, pins=False)

    def make_model_runner(self, device):
        device.reads = 0
        runner = AcceleratorModelRunner(self.context, self.platform, self.registry, device)
        runner.seat = self.seat
        return runner
