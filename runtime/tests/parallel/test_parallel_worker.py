"""A TorchWorker among others: joining, its part of the configuration, ending and leaving."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from attrs import evolve
from hardpoint.capabilities import YES, Capability
from hardpoint.config.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    RpcConfig,
    SchedulerConfig,
)
from hardpoint.platform import Platform
from hardpoint.records import Limits, Placement, Verdict, WorkerContext
from hardpoint.registry import Registry
from hardpoint_runtime.device import HostDeviceOps, MemoryInfo
from hardpoint_runtime.parallel.errors import CollectiveEndedError, PeerLostError
from hardpoint_runtime.parallel.groups import Axis
from hardpoint_runtime.worker import TorchWorker


class HostPlatform(Platform):
    name: ClassVar[str] = "host"
    worker_class: ClassVar[str] = "hardpoint_runtime.worker:TorchWorker"
    model_runner_class: ClassVar[str] = "hardpoint_runtime.model_runner:TorchModelRunner"
    capabilities: ClassVar[dict] = dict.fromkeys(Capability, YES)

    def probe(self):
        return Verdict(available=True, reason="a test")

    def limits(self, config):
        return Limits(dtypes=("float32",), default_dtype="float32")

    def placement(self, config):
        return Placement()


class Device(HostDeviceOps):
    """Notes the order of what is asked, and how ranks meet."""

    def __init__(self):
        super().__init__()
        self.calls, self.meetings = [], []

    def set_device(self):
        self.calls.append("set_device")

    def seed(self, seed):
        self.calls.append("seed")

    def memory_info(self):
        self.calls.append("memory_info")
        return MemoryInfo(free=1 << 30, total=1 << 30)

    def memory_allocated(self):
        return 0

    def peak_memory(self, run):
        run()
        return 0

    def make_communicator(self, group, meeting):
        self.calls.append(f"join {group.axis.value}")
        self.meetings.append((group, meeting))
        return super().make_communicator(group, meeting)


class Worker(TorchWorker):
    def make_device(self):
        return Device()


@pytest.fixture
def make_worker(odd_llama, rendezvous):
    def make(rank, tensor, pipeline, **more):
        config = Config(
            model=ModelConfig(dtype="float32", seed=3),
            cache=CacheConfig(block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            parallel=ParallelConfig(
                tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, collective_timeout=30
            ),
            rpc=RpcConfig(spin_us=50.0),
            description=odd_llama,
        )
        context = WorkerContext(
            config=config,
            rank=rank,
            local_rank=rank,
            world_size=tensor * pipeline,
            rendezvous=rendezvous,
            model_runner=HostPlatform.model_runner_class,
        )
        return Worker(evolve(context, **more), HostPlatform(), Registry([]))

    return make


def together(workers, function):
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(function, workers))


@pytest.fixture
def four(make_worker):
    """Workers of two stages of two shards that have taken their devices."""
    workers = [make_worker(rank, 2, 2) for rank in range(4)]
    together(workers, lambda worker: worker.init_device())
    yield workers
    for worker in workers:
        worker.shutdown()


def test_groups_are_joined_before_memory_is_measured(four):
    for worker in four:
        assert worker.device.calls == [
            "set_device", "join tensor", "join pipeline", "seed", "memory_info",
        ]  # fmt: skip


def test_how_long_ranks_wait_is_configured(four):
    for worker in four:
        (tensor, meeting), (pipeline, again) = worker.device.meetings
        assert tensor.axis is Axis.TENSOR
        assert pipeline.axis is Axis.PIPELINE
        assert worker.rank in set(tensor.ranks) & set(pipeline.ranks)
        assert meeting is again
        assert (meeting.rank, meeting.timeout) == (worker.rank, 30)
        assert meeting.spin == pytest.approx(50e-6)


def test_each_loads_and_profiles_its_part(four):
    held = [report.weight_bytes for report in together(four, lambda w: w.load_model())]
    assert len(set(held)) == 4
    together(four, lambda worker: worker.determine_available_memory())
    assert [len(worker.get_kv_cache_spec()) for worker in four] == [3, 3, 2, 2]
    assert four[0].model_runner.seat is four[0].seat
    assert four[0].model_runner.operations is not None


def test_what_operations_must_serve_are_the_ranks_own_heads(four, monkeypatch):
    from hardpoint_runtime import model_runner

    asked = []
    monkeypatch.setattr(
        model_runner, "resolve_operations", lambda registry, name, needs: asked.append(needs)
    )
    for worker in four[:2]:
        worker.model_runner.make_operations()
    assert [(needs["num_heads"], needs["num_kv_heads"]) for needs in asked] == [(4, 2), (2, 1)]


def test_end_collectives_releases_every_group_of_the_rank(four):
    results = {}

    def wait(worker, name):
        try:
            getattr(worker.seat, name).all_reduce(torch.ones(2))
        except Exception as error:
            results[name] = error

    threads = [threading.Thread(target=wait, args=(four[0], "tensor"))]
    threads.append(threading.Thread(target=wait, args=(four[3], "pipeline")))
    for thread in threads:
        thread.start()
    four[0].end_collectives()
    four[3].end_collectives()
    for thread in threads:
        thread.join(30)
    assert {type(error) for error in results.values()} == {CollectiveEndedError}
    assert len(results) == 2


def test_end_collectives_releases_a_rank_that_still_waits_to_join(make_worker):
    worker = make_worker(0, 2, 1)
    outcome = []

    def start():
        try:
            worker.init_device()
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    worker.end_collectives()
    thread.join(30)
    assert [type(error) for error in outcome] == [CollectiveEndedError]
    worker.shutdown()


def test_a_rank_that_shuts_down_has_left(four):
    four[1].shutdown()
    with pytest.raises(PeerLostError, match="rank 1 ended, or left"):
        four[0].seat.tensor.barrier()


def test_a_worker_alone_joins_nothing(make_worker):
    worker = make_worker(0, 1, 1, rendezvous=None)
    worker.init_device()
    assert worker.device.calls == ["set_device", "seed", "memory_info"]
    assert worker.seat.is_alone
    worker.end_collectives()
    worker.shutdown()
