"""A process with one cpu worker and the tiny random model; run by the tests, prints JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path

from attrs import evolve
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.messages import NewRequestData, SchedulerOutput
from hardpoint.records import WorkerContext
from hardpoint.references import resolve
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import select_platform

TINY = ModelDescription(
    path=Path("tiny"), format="dummy", architecture="LlamaForCausalLM", num_layers=4,
    hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_size=16,
    vocab_size=8192, context_length=512, stored_dtype="float32",
    hf_config={"rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
)  # fmt: skip


def start(**keys):
    config = load_config(overrides={"platform": "cpu", "seed": 1, **keys}, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=TINY)
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    resolution.check(config, registry, platform)
    context = WorkerContext(config=config, rank=0, local_rank=0, world_size=1)
    worker = resolve(registry.worker_class(config, platform))(context, platform, registry)
    worker.init_device()
    return worker


def allocate(worker, available):
    specs = worker.get_kv_cache_spec()
    blocks = available // sum(spec.page_bytes for spec in specs.values())
    spec = next(iter(specs.values()))
    worker.initialize_from_config(
        KVCacheConfig(
            num_blocks=blocks,
            groups=(KVCacheGroup(layers=tuple(specs), spec=spec),),
            tensors=tuple(
                KVCacheTensor(num_bytes=each.page_bytes * blocks, layers=(name,))
                for name, each in specs.items()
            ),
        )
    )


def step(worker, blocks):
    prompt = tuple(range(1, 513))
    request = NewRequestData(
        req_id="a",
        prompt=prompt,
        sampling=SamplingParams(seed=1, top_k=9, top_p=0.9, logprobs=5),
        block_ids=(blocks,),
    )
    plan = SchedulerOutput(step_id=1, new=(request,), num_tokens={"a": 512}, total_tokens=512)
    return worker.execute_model(plan)


def own_memory() -> int:
    """Return the bytes that are no file's: those the system may take back at any moment."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", status, re.MULTILINE)
    return sum(map(int, kilobytes)) << 10


def memory() -> dict[str, int]:
    from hardpoint_cpu.memory import host_memory, resident, resident_peak

    # A budget a little above what the process holds, so that the test touches 300 MiB, not GiBs.
    total = host_memory().total
    share = (resident() + (450 << 20)) / total
    worker = start(memory_utilization=share, block_size=16)
    worker.load_model()
    available = worker.determine_available_memory()
    before = own_memory()
    allocate(worker, available)
    untouched = own_memory() - before
    for cache in worker.get_model_runner().kv_cache.layers.values():
        cache.key.fill_(1.0)
        cache.value.fill_(1.0)
    touched = own_memory() - before
    worker.compile_or_warm_up_model()
    step(worker, tuple(range(1, 33)))
    return {
        "budget": worker.budget,
        "available": available,
        "untouched": untouched,
        "touched": touched,
        "peak": max(resident(), resident_peak()),
    }


def binding() -> dict[str, object]:
    import torch

    cores = sorted(os.sched_getaffinity(0))
    seen = {}

    def run() -> None:
        worker = start(**{"plugins.cpu.cpus": str(cores[-1]), "plugins.cpu.threads": 1})
        worker.load_model()
        allocate(worker, 64 << 20)
        step(worker, tuple(range(1, 33)))
        seen["worker"] = sorted(os.sched_getaffinity(0))
        seen["threads"] = torch.get_num_threads()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return {"cores": cores, "driver": sorted(os.sched_getaffinity(0)), **seen}


if __name__ == "__main__":
    print(json.dumps({"memory": memory, "binding": binding}[sys.argv[1]]()))
