"""Several cpu workers: their parts of the memory, and how they exchange tensors."""

from __future__ import annotations

import pytest
from hardpoint.capabilities import Capability, Support
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint.selection import select_platform
from hardpoint_cpu import memory
from hardpoint_cpu.device import CpuDeviceOps
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_cpu.settings import CpuSettings
from hardpoint_cpu.worker import CpuWorker


def test_shards_and_stages_are_offered():
    platform = CpuPlatform()
    assert platform.support(Capability.TENSOR_PARALLEL) is Support.YES
    assert platform.support(Capability.PIPELINE_PARALLEL) is Support.YES
    config = load_config(
        overrides={"tensor_parallel_size": 3, "pipeline_parallel_size": 2}, environ={}
    )
    placement = platform.placement(config)
    assert placement.num_workers == 6
    assert placement.output_rank == 3  # the first shard of the last stage


def test_workers_share_the_memory_equally(monkeypatch):
    host = memory.host_memory()
    monkeypatch.setattr(memory, "host_memory", lambda: host)
    alone, third = CpuDeviceOps().memory_info(), CpuDeviceOps(3).memory_info()
    assert (alone.total, alone.free) == (host.total, host.free)
    assert (third.total, third.free) == (host.total // 3, host.free // 3)


@pytest.mark.parametrize("kind", ["auto", "gloo"])
def test_a_worker_knows_how_many_share_and_how_they_exchange(kind):
    config = load_config(overrides={"tensor_parallel_size": 2}, environ={})
    context = WorkerContext(config=config, rank=1, local_rank=1, world_size=2)
    worker = CpuWorker(context, CpuPlatform(CpuSettings(collectives=kind)), registry=None)
    device = worker.make_device()
    assert (device.workers, device.collectives) == (2, kind)


def test_another_way_of_exchange_is_refused_with_those_that_there_are():
    config = load_config(
        overrides={"platform": "cpu", "plugins.cpu.collectives": "pigeon"}, environ={}
    )
    with pytest.raises(ConfigError, match="auto, shared_memory, gloo"):
        select_platform(Registry.discover(config), config)
