"""What the worker asks of torch.xpu, made up here, and what excludes what."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from hardpoint.capabilities import Capability
from hardpoint.config.schema import Config, GraphConfig, ModelConfig, ParallelConfig
from hardpoint.errors import ConfigError, PluginError, UnsupportedError
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint_multiproc.start_choice import PLAIN, choose
from hardpoint_runtime.accelerator import device as accelerator
from hardpoint_xpu.device import XpuDeviceOps, XpuSubstituteOps
from hardpoint_xpu.platform import XpuPlatform
from hardpoint_xpu.settings import XpuSettings
from hardpoint_xpu.worker import XpuWorker


@pytest.fixture
def devices(monkeypatch):
    """Have torch.xpu show so many devices, or be absent (None). torch.get_device_module keeps what
    it found: it finds this, and after the test the true one again.
    """

    def make(count, *, bfloat16=True):
        torch.get_device_module.cache_clear()
        if count is None:
            monkeypatch.delattr(torch, "xpu")
            return None
        made = SimpleNamespace(
            __name__="torch.xpu",
            is_available=lambda: count > 0,
            device_count=lambda: count,
            current=None,
            is_bf16_supported=lambda including_emulation=True: including_emulation or bfloat16,
            get_device_name=lambda device: "Intel Iris Xe",
        )
        made.set_device = lambda index: setattr(made, "current", index)
        monkeypatch.setattr(torch, "xpu", made)
        return made

    yield make
    torch.get_device_module.cache_clear()


@pytest.fixture(autouse=True)
def found_before():
    """Have the true module be found first, as by any test before in this process."""
    with contextlib.suppress(RuntimeError):
        for index in (0, 1):
            torch.get_device_module(torch.device("xpu", index))


def worker(local_rank=0, settings=None, dtype="bfloat16", **more):
    config = Config(model=ModelConfig(dtype=dtype), **more)
    context = WorkerContext(config=config, rank=local_rank, local_rank=local_rank, world_size=2)
    return XpuWorker(context, XpuPlatform(settings), Registry([]))


@pytest.mark.parametrize("count", [None, 0])
def test_without_a_device_the_worker_says_what_to_look_at(devices, count):
    devices(count)
    with pytest.raises(PluginError, match="sees no device 'xpu' in this process: is Level Zero"):
        worker().make_device()


def test_of_two_devices_each_rank_takes_its_own_and_a_third_is_refused(devices):
    made = devices(2)
    for local_rank in (0, 1):
        port = worker(local_rank).make_device()
        assert type(port) is XpuDeviceOps
        assert (port.device.type, port.device.index, port.count()) == ("xpu", local_rank, 2)
        port.set_device()
        assert made.current == local_rank
    with pytest.raises(ConfigError, match="device 2 of xpu is asked for"):
        worker(2).make_device().set_device()


@pytest.mark.parametrize(
    ("bfloat16", "dtype", "refused"),
    [(False, "bfloat16", True), (False, "float32", False), (True, "bfloat16", False)],
)
def test_bfloat16_is_refused_where_torch_says_that_it_is_not_computed(
    devices, bfloat16, dtype, refused
):
    devices(2, bfloat16=bfloat16)
    made = worker(dtype=dtype)
    made.device = made.make_device()
    if not refused:
        made.check_bfloat16()
        return
    with pytest.raises(ConfigError, match="dtype = 'bfloat16': Intel Iris Xe does not compute in"):
        made.check_bfloat16()


def test_what_is_asked_of_torch_is_there():
    for name in ("is_available", "is_bf16_supported", "get_device_name", XpuDeviceOps.graph_class):
        assert hasattr(torch.xpu, name)
    begin = inspect.signature(getattr(torch.xpu, XpuDeviceOps.graph_class).capture_begin)
    assert list(begin.parameters) == ["self", "pool"]


def test_the_substitute_is_built_without_torch_xpu(devices):
    devices(None)
    made = worker(1, XpuSettings(substitute="host", substitute_devices=2)).make_device()
    assert type(made) is XpuSubstituteOps
    made.set_device()
    with pytest.raises(ConfigError, match="the substitute has 1"):
        worker(1, XpuSettings(substitute="host")).make_device().set_device()


def test_ranks_talk_by_xccl(devices, monkeypatch):
    devices(1)
    seen = []
    monkeypatch.setattr(accelerator, "device_communicator", lambda *given: seen.append(given))
    port = worker().make_device()
    port.make_communicator("group", "meeting")
    assert seen == [(port, "group", "meeting", "xccl")]


# Start.


def test_workers_are_new_programs():
    way = choose("auto", XpuPlatform().fork_safe(), {})
    assert way.kind == PLAIN
    assert "importing torch.xpu starts threads" in way.reason
    with pytest.raises(ValueError, match="threads"):
        choose("nursery", XpuPlatform().fork_safe(), {})
    assert XpuPlatform.preload == ()


# Sleep and graphs.


@pytest.mark.parametrize(
    ("sleep", "mode", "refused"),
    [
        ("on", "full", True),
        ("on", "piecewise", True),
        ("on", "none", False),
        ("on", None, False),
        ("auto", "full", False),
        ("off", "full", False),
    ],
)
def test_sleep_and_graphs_are_not_both_promised(sleep, mode, refused):
    platform = XpuPlatform(XpuSettings(substitute="host", sleep=sleep))
    problems = platform.check(evolve(Config(), graph=GraphConfig(graph_mode=mode)))
    assert [problem.key for problem in problems] == (["graph_mode"] if refused else [])
    if refused:
        assert "sleep and wake and graphs exclude each other here" in problems[0].message


@pytest.mark.parametrize(
    ("tensor", "stages", "mode", "refused"),
    [
        (2, 1, "piecewise", True),
        (2, 1, "full", True),
        (2, 1, "none", False),
        (2, 1, None, False),
        (1, 2, "full", False),
    ],
)
def test_graphs_hold_no_collectives(tensor, stages, mode, refused):
    """oneCCL's operations cannot be captured."""
    parallel = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    platform = XpuPlatform(XpuSettings(substitute="host", substitute_devices=2))
    config = evolve(Config(), graph=GraphConfig(graph_mode=mode), parallel=parallel)
    problems = platform.check(config)
    assert [problem.key for problem in problems] == (["graph_mode"] if refused else [])
    if refused:
        assert "collectives of xccl" in problems[0].message


def test_graphs_are_for_those_who_ask():
    assert (XpuDeviceOps.default_graph_mode, XpuSubstituteOps.default_graph_mode) == ("none",) * 2


def test_the_pair_that_excludes_each_other_is_data():
    assert XpuPlatform.exclusive_capabilities == ((Capability.SLEEP, Capability.GRAPHS),)


@pytest.mark.parametrize("call", [lambda w: w.sleep(1), lambda w: w.discard(["weights"])])
def test_where_there_are_graphs_sleep_is_refused(call):
    made = worker()
    made.model_runner = SimpleNamespace(graph_plan=SimpleNamespace(graphs={"a graph"}))
    with pytest.raises(UnsupportedError, match=r"there are graphs.*Set graph_mode to none"):
        call(made)


def test_without_graphs_nothing_is_refused():
    made = worker()
    made.model_runner = SimpleNamespace(graph_plan=SimpleNamespace(graphs=set()))
    made.refuse_to_sleep()
