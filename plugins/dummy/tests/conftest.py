"""A worker of the dummy platform without an executor, and a scheduler that makes trouble for it."""

from __future__ import annotations

import pytest
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.messages import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import select_platform
from hardpoint_dummy.worker import DummyWorker

BLOCK = 4


def make_worker(num_blocks=64, **overrides):
    settings = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "block_size": BLOCK,
        **overrides,
    }
    config = load_config(overrides=settings, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    context = WorkerContext(config=config, rank=0, local_rank=0, world_size=1)
    worker = DummyWorker(context, platform, registry)
    worker.init_device()
    worker.load_model()
    specs = worker.get_kv_cache_spec()
    spec = next(iter(specs.values()))
    size = num_blocks * spec.page_bytes
    worker.initialize_from_config(
        KVCacheConfig(
            num_blocks=num_blocks,
            groups=(KVCacheGroup(layers=tuple(specs), spec=spec),),
            tensors=tuple(KVCacheTensor(num_bytes=size, layers=(layer,)) for layer in specs),
        )
    )
    worker.compile_or_warm_up_model()
    return worker


class Driver:
    """One worker and what the driver knows of its requests; each call is one step."""

    def __init__(self, **overrides):
        self.worker = make_worker(**overrides)
        self.num_blocks = overrides.get("num_blocks", 64)
        self.free = list(range(1, self.num_blocks))
        self.requests = {}
        self.step_id = 0

    def step(self, **fields):
        self.step_id += 1
        return self.worker.execute_model(SchedulerOutput(step_id=self.step_id, **fields))

    def start(self, req_id, prompt, *, count=None, computed=0, blocks=None, **request):
        """Send a new request and compute its first ``count`` tokens (None: all)."""
        step = request.pop("step", {})
        held = self.take(len(prompt)) if blocks is None else list(blocks)
        sampling = request.pop("sampling", SamplingParams(temperature=0, seed=1))
        new = NewRequestData(
            req_id=req_id,
            prompt=tuple(prompt),
            sampling=sampling,
            block_ids=(tuple(held),),
            num_computed=computed,
            **request,
        )
        count = len(prompt) - computed if count is None else count
        self.requests[req_id] = state = {
            "tokens": list(prompt), "prompt": len(prompt), "blocks": held, "computed": computed
        }  # fmt: skip
        output = self.step(new=(new,), num_tokens={req_id: count}, total_tokens=count, **step)
        return self.note(req_id, state, count, output)

    def go(self, req_id, count=1, drafts=(), *, resumed=False, **fields):
        """Compute ``count`` more tokens of a known request."""
        state = self.requests[req_id]
        missing = state["computed"] + count + len(drafts) - len(state["blocks"]) * BLOCK
        fresh = self.take(missing) if missing > 0 else []
        state["blocks"] += fresh
        sent = state["blocks"] if resumed else fresh
        running = CachedRequestData(
            req_ids=(req_id,),
            new_blocks=((tuple(sent),),) if sent else (None,),
            num_computed=(state["computed"],),
            num_output=(len(state["tokens"]) - state["prompt"],),
            resumed=frozenset([req_id] if resumed else []),
        )
        total = count + len(drafts)
        output = self.step(
            running=running,
            num_tokens={req_id: total},
            total_tokens=total,
            drafts={req_id: tuple(drafts)} if drafts else {},
            **fields,
        )
        return self.note(req_id, state, count, output)

    def note(self, req_id, state, count, output):
        state["output"] = output
        state["computed"] += count
        if output.tokens:
            chosen = output.tokens[output.req_ids.index(req_id)]
            state["computed"] += max(0, len(chosen) - 1)
            state["tokens"] += chosen
        return output

    def preempt(self, req_id):
        """Take the request's blocks away; the next user overwrites them."""
        state = self.requests[req_id]
        self.free += state["blocks"]
        state["blocks"], state["computed"] = [], 0
        self.step(preempted=frozenset([req_id]))

    def finish(self, req_id):
        state = self.requests.pop(req_id)
        self.free += state["blocks"]
        self.step(finished=frozenset([req_id]))

    def take(self, tokens):
        return [self.free.pop(0) for _ in range(-(-tokens // BLOCK))]

    def output_of(self, req_id):
        state = self.requests[req_id]
        return state["tokens"][state["prompt"] :]

    def generate(self, req_id, prompt, length, **request):
        """Run one request alone, to ``length`` output tokens."""
        self.start(req_id, prompt, **request)
        while len(self.output_of(req_id)) < length:
            self.go(req_id)
        return self.output_of(req_id)[:length]


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def make_driver():
    return Driver
