"""What the port asks of torch and of the driver, as far as that can be seen without a GPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from hardpoint.capabilities import Capability, Support
from hardpoint.config.schema import Config
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint_cuda import device as device_module
from hardpoint_cuda.compute_capability import FEATURES, features_of, least
from hardpoint_cuda.device import CudaDeviceOps
from hardpoint_cuda.platform import CudaPlatform
from hardpoint_cuda.settings import CudaSettings
from hardpoint_cuda.worker import CudaWorker
from hardpoint_runtime.accelerator import device as accelerator
from hardpoint_runtime.accelerator.placed_pools import PlacedPools
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps
from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory


class Memory(VirtualMemory):
    granularity = 2 << 20

    def __init__(self, index):
        self.index = index

    reserve = map = unmap = release = read = write = None


Memory.__abstractmethods__ = frozenset()


def worker(local_rank=0, settings=None):
    context = WorkerContext(config=Config(), rank=local_rank, local_rank=local_rank, world_size=2)
    return CudaWorker(context, CudaPlatform(settings), Registry([]))


def test_the_port_is_of_the_ranks_gpu():
    port = worker(1).make_device()
    assert type(port) is CudaDeviceOps
    assert port.device == torch.device("cuda", 1)
    assert port.pins


def test_the_substitute_is_only_built_where_it_is_asked_for():
    settings = CudaSettings(substitute="host", substitute_bytes=1 << 30)
    port = worker(0, settings).make_device()
    assert type(port) is SubstituteDeviceOps
    assert port.memory_info().total == 1 << 30


def test_pools_are_over_the_drivers_memory(monkeypatch):
    monkeypatch.setattr(device_module, "CudaVirtualMemory", Memory)
    pools = CudaDeviceOps("cuda", 1).make_pools()
    assert type(pools) is PlacedPools
    assert (pools.memory.index, pools.device) == (1, torch.device("cuda", 1))


def test_ranks_talk_by_nccl(monkeypatch):
    seen = []
    monkeypatch.setattr(accelerator, "device_communicator", lambda *given: seen.append(given))
    port = CudaDeviceOps("cuda", 0)
    port.make_communicator("group", "meeting")
    assert seen == [(port, "group", "meeting", "nccl")]


def test_what_is_asked_of_torch_is_there():
    for name in (CudaDeviceOps.graph_class, "mem_get_info", "memory_reserved", "Stream"):
        assert hasattr(torch.cuda, name)
    graph = getattr(torch.cuda, CudaDeviceOps.graph_class)
    assert "capture_error_mode" in inspect.signature(graph.capture_begin).parameters


def test_libraries_work_space_is_torchs_to_give_up(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: asked.append("cleared"), raising=False
    )
    CudaDeviceOps("cuda", 0).release_workspaces()
    assert asked == ["cleared"]


def test_every_capability_is_declared():
    assert set(CudaPlatform.capabilities) == set(Capability)
    for capability in (Capability.SLEEP, Capability.WEIGHT_RELOAD, Capability.GRAPHS):
        assert CudaPlatform().support(capability) is Support.YES


@pytest.mark.parametrize(
    ("capability", "generation", "bfloat16", "float8"),
    [
        ((7, 0), "Volta", False, False),
        ((7, 5), "Turing", False, False),
        ((8, 0), "Ampere", True, False),
        ((8, 8), "Ampere", True, False),
        ((8, 9), "Ada Lovelace", True, True),
        ((9, 0), "Hopper", True, True),
        ((10, 0), "Blackwell", True, True),
        ((99, 0), "Blackwell", True, True),
    ],
)
def test_features_by_compute_capability(capability, generation, bfloat16, float8):
    found = features_of(capability)
    assert (found.generation, found.bfloat16, found.float8) == (generation, bfloat16, float8)


def test_shared_memory_of_a_block_by_compute_capability():
    """KiB, as the table of CCCL has them."""
    numbers = {name: features.shared_kib for name, features in FEATURES.items()}
    assert numbers == {
        (7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 8): 99,
        (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99,
        (12, 1): 99,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("torch_version", "cuda", "expected"),
    [
        ("2.10.0+cu126", "12.6", (7, 0)),
        ("2.10.0+cu128", "12.8", (7, 0)),
        ("2.11.0+cu126", "12.6", (7, 0)),
        ("2.11.0+cu128", "12.8", (7, 5)),
        ("2.13.0.dev20260601+cu129", "12.9", (7, 5)),
        ("2.9.1+cu130", "13.0", (7, 5)),
        (None, None, (7, 0)),
    ],
)
def test_the_least_is_what_torch_was_built_for(torch_version, cuda, expected):
    assert least({"__version__": torch_version, "cuda": cuda}) == expected


def test_what_is_older_than_the_first_tensor_cores_has_no_features():
    assert features_of((6, 1)) is None
    assert min(FEATURES) == (7, 0)
