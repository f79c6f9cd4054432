"""A worker whose port to the device is not there or says what cannot be: the message names it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hardpoint.config import Config
from hardpoint.errors import PluginError
from hardpoint.records import WorkerContext
from hardpoint_runtime.device import HostDeviceOps, MemoryInfo
from hardpoint_runtime.worker import TorchWorker


class AcmeWorker(TorchWorker):
    pass


class AcmeDeviceOps(HostDeviceOps):
    info: object = None

    def memory_info(self):
        return self.info

    def memory_allocated(self):
        return 0


@pytest.fixture
def worker():
    context = WorkerContext(config=Config(), rank=0, local_rank=0, world_size=1)
    return AcmeWorker(context, SimpleNamespace(name="acme"), SimpleNamespace())


def test_a_platform_of_which_torch_has_no_device(worker):
    with pytest.raises(
        PluginError, match=r"no device 'acme'.*AcmeWorker must override make_device"
    ):
        worker.make_device()


@pytest.mark.parametrize(
    "info",
    [(1, 2), None, MemoryInfo(free=3, total=2), MemoryInfo(free=-1, total=2)],
)
def test_figures_of_memory_that_cannot_be(worker, info):
    device = AcmeDeviceOps()
    device.info = info
    with pytest.raises(PluginError, match=r"AcmeDeviceOps\.memory_info returned") as caught:
        worker._budget(device)
    assert repr(info) in str(caught.value)
