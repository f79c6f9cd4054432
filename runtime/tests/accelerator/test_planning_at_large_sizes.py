"""The account of memory for models that no test machine holds: weights, cache and work space are
meta tensors, counted and never there.
"""

from __future__ import annotations

import resource
import weakref
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hardpoint.capabilities import NOT_YET, Capability
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config.schema import CacheConfig, Config, ModelConfig, SchedulerConfig
from hardpoint.platform import Platform
from hardpoint.records import Limits, Placement, Verdict, WorkerContext
from hardpoint.registry import Registry
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.model_runner import AcceleratorModelRunner
from hardpoint_runtime.accelerator.worker import AcceleratorWorker
from hardpoint_runtime.device import MemoryInfo
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 1 << 30


class Counting(TorchDispatchMode):
    """Counts the bytes of meta tensors that are alive."""

    def __init__(self):
        super().__init__()
        self.seen = weakref.WeakKeyDictionary()
        self.held = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and each.is_meta:
                self.count(each.untyped_storage())
        return result

    def count(self, storage):
        key = storage._cdata
        if key in self.__dict__.setdefault("keys", {}):
            return
        num_bytes = storage.nbytes()
        self.keys[key] = num_bytes
        self.held += num_bytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self.gone, key)

    def gone(self, key):
        self.held -= self.keys.pop(key)


class MetaDeviceOps(AcceleratorDeviceOps):
    """A device whose memory is counted, of ``total`` bytes."""

    def __init__(self, total):
        super().__init__("cpu", 0, pins=False)
        self.device = torch.device("meta")
        self.total = total
        self.counting = Counting()

    def set_device(self):
        pass

    def seed(self, seed):
        pass

    def synchronize(self):
        pass

    def memory_info(self):
        return MemoryInfo(free=max(0, self.total - self.counting.held), total=self.total)

    def memory_allocated(self):
        return self.counting.held

    memory_reserved = memory_allocated

    def peak_memory(self, run):
        self.counting.peak = self.counting.held
        run()
        return self.counting.peak

    def to_device(self, values, dtype):
        return torch.empty(torch.as_tensor(values).shape, dtype=dtype, device="meta")

    def write(self, target, values):
        pass

    def to_host(self, tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def fetch(self, tensor):
        from hardpoint_runtime.staged_copies import Fetch

        return Fetch(self.to_host(tensor))


class MetaRunner(AcceleratorModelRunner):
    def load_weights(self, model):
        """Nothing is read: meta tensors have shapes only."""


class MetaWorker(AcceleratorWorker):
    total = 0

    def make_device(self):
        return MetaDeviceOps(self.total)


class MetaPlatform(Platform):
    name = "meta"
    worker_class = "x:Worker"
    model_runner_class = f"{__name__}:MetaRunner"
    capabilities = dict.fromkeys(Capability, NOT_YET)

    def probe(self):
        return Verdict(available=True, reason="a test")

    def limits(self, config):
        return Limits(dtypes=("bfloat16",), default_dtype="bfloat16")

    def placement(self, config):
        return Placement()


LARGE = {
    "8 B": (32, 4096, 14336, 32, 8, 128256),
    "70 B": (80, 8192, 28672, 64, 8, 128256),
    "405 B": (126, 16384, 53248, 128, 8, 128256),
}


def description(layers, hidden, intermediate, heads, kv_heads, vocab):
    return ModelDescription(
        path=Path("large"), format="dummy", architecture="LlamaForCausalLM", num_layers=layers,
        hidden_size=hidden, intermediate_size=intermediate, num_heads=heads,
        num_kv_heads=kv_heads, head_size=128, vocab_size=vocab, context_length=8192,
        stored_dtype="bfloat16",
        hf_config={"rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    )  # fmt: skip


def parameters(layers, hidden, intermediate, heads, kv_heads, vocab):
    attention = hidden * 128 * (2 * heads + 2 * kv_heads)
    return (
        2 * vocab * hidden + hidden + layers * (attention + 3 * hidden * intermediate + 2 * hidden)
    )


class MetaRegistry(Registry):
    def __init__(self):
        super().__init__([])

    def offers(self, hook, platform_name, description=None):
        return {}


@pytest.fixture
def make_worker(monkeypatch):
    def make(shape, total):
        config = Config(
            model=ModelConfig(dtype="bfloat16"),
            cache=CacheConfig(block_size=16),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048),
            description=description(*shape),
        )
        context = WorkerContext(
            config=config, rank=0, local_rank=0, world_size=1,
            model_runner=f"{__name__}:MetaRunner",
        )  # fmt: skip
        worker = MetaWorker(context, MetaPlatform(), MetaRegistry())
        worker.total = total
        monkeypatch.setattr(
            worker, "make_model_runner",
            lambda device: MetaRunner(context, worker.platform, worker.registry, device),
        )  # fmt: skip
        worker.init_device()
        return worker

    return make


@pytest.mark.parametrize("name", LARGE)
def test_weights_cache_and_work_space_add_up(name, make_worker):
    shape = LARGE[name]
    weights = parameters(*shape) * 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker = make_worker(shape, 2 * weights)
    with worker.port.counting:
        assert worker.load_model().weight_bytes == weights
        available = worker.determine_available_memory()
    profile = worker.memory_profile
    assert profile.weights == weights
    layers, hidden, intermediate, *_, vocab = shape
    step = profile.peak - weights
    logits = 64 * vocab * 4
    widest = 2048 * max(2 * intermediate, hidden) * 2
    assert max(logits, widest) <= step < 12 * max(logits, widest)
    assert available == worker.budget - profile.peak - profile.rounding
    page = worker.get_cache_block_size_bytes()
    assert page == layers * 2 * 16 * shape[4] * 128 * 2
    assert available // page > 1000
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < weights // 10


def test_a_model_larger_than_the_device_leaves_less_than_nothing(make_worker):
    worker = make_worker(LARGE["70 B"], 80 * GIB)
    with worker.port.counting:
        worker.load_model()
        assert worker.determine_available_memory() < -50 * GIB
    assert evolve(worker.memory_profile, budget=200 * GIB).available > 0
