"""A platform, a registry without plugins, a tiny random Llama, and a driver for runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from attrs import evolve
from hardpoint.capabilities import NOT_YET, YES, Capability, Support
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config.schema import CacheConfig, Config, GraphConfig, ModelConfig, SchedulerConfig
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.messages import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.platform import Platform
from hardpoint.pooling_params import PoolingParams
from hardpoint.records import Limits, Offer, Placement, Verdict, WorkerContext
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.device import HostDeviceOps, TorchDeviceOps
from hardpoint_runtime.model_runner import TorchModelRunner

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A Llama of transformers, spread enough that it does not repeat itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class HostPlatform(Platform):
    name: ClassVar[str] = "host"
    worker_class: ClassVar[str] = "hardpoint_runtime.worker:TorchWorker"
    model_runner_class: ClassVar[str] = "hardpoint_runtime.model_runner:TorchModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = {
        each: YES if each is Capability.LOGPROBS else NOT_YET for each in Capability
    }

    def probe(self) -> Verdict:
        return Verdict(available=True, reason="a test")

    def limits(self, config: Config) -> Limits:
        return Limits(dtypes=("float32", "bfloat16", "float16"), default_dtype="float32")

    def placement(self, config: Config) -> Placement:
        return Placement()

    def context(self, config: Config) -> Mapping[str, object]:
        return {"host": "constant"}


@pytest.fixture
def platform(classes) -> HostPlatform:
    """With what a worker of ``classes`` asks of its own platform, if that is named."""
    if classes is None or classes.platform_class is None:
        return HostPlatform()

    class Tried(HostPlatform, classes.platform_class):
        """Where both say something, the test's."""

    settings = classes.platform_class.default_settings()
    return Tried(evolve(settings, substitute="host"))


class PlainRegistry(Registry):
    """A registry without plugins; ``given`` are offers by hook."""

    def __init__(self) -> None:
        super().__init__([])
        self.given: dict[str, list[Offer]] = {}

    def offers(self, hook, platform_name, description=None):
        return {offer.name: offer for offer in self.given.get(hook, ())}

    def model_runner_class(self, config, platform) -> str:
        return platform.model_runner_class


@pytest.fixture
def registry() -> PlainRegistry:
    return PlainRegistry()


def tiny(**more) -> ModelDescription:
    return ModelDescription(
        path=Path("tiny"),
        format="dummy",
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        vocab_size=97,
        context_length=256,
        stored_dtype="float32",
        hf_config={"rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        **more,
    )


@pytest.fixture
def make_context() -> Callable[..., WorkerContext]:
    def make(*, description=None, cancelled=lambda: False, **more) -> WorkerContext:
        config = Config(
            graph=GraphConfig(graph_mode="none"),  # whatever the device's default is
            model=ModelConfig(
                dtype=more.pop("dtype", "float32"),
                seed=3,
                max_model_len=more.pop("max_model_len", None),
            ),
            cache=CacheConfig(block_size=more.pop("block_size", 4)),
            scheduler=SchedulerConfig(
                max_num_seqs=more.pop("max_num_seqs", 8),
                max_num_batched_tokens=more.pop("max_num_batched_tokens", 64),
            ),
            description=description or tiny(),
        )
        config = evolve(config, **more)
        return WorkerContext(config=config, rank=0, local_rank=0, world_size=1, cancelled=cancelled)

    return make


def plan_for(specs, num_blocks) -> KVCacheConfig:
    spec = next(iter(specs.values()))
    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=(KVCacheGroup(layers=tuple(specs), spec=spec),),
        tensors=tuple(
            KVCacheTensor(num_bytes=each.page_bytes * num_blocks, layers=(name,))
            for name, each in specs.items()
        ),
    )


@pytest.fixture(scope="session")
def classes(request):
    """What a plugin of ``ordered_fake`` brings, if one is loaded: a device, a worker, a runner."""
    manager = request.config.pluginmanager
    return manager.get_plugin("ordered_plugin") or manager.get_plugin("substitute_plugin")


@pytest.fixture(scope="session")
def device_class(classes) -> type[TorchDeviceOps]:
    """The device of every runner here: host memory, unless a plugin brings another."""
    return HostDeviceOps if classes is None else classes.DeviceOps


@pytest.fixture(scope="session")
def runner_class(classes) -> type[TorchModelRunner]:
    """The runner of every test here that names none: as with the device."""
    return TorchModelRunner if classes is None else classes.runner_class


@pytest.fixture(name="plan_for")
def _plan_for() -> Callable[..., KVCacheConfig]:
    return plan_for


@pytest.fixture
def make_runner(
    make_context, platform, registry, device_class, runner_class
) -> Callable[..., TorchModelRunner]:
    def make(runner_class=runner_class, *, num_blocks=200, registry=registry, **more):
        context = make_context(**more)
        runner = runner_class(context, platform, registry, device_class())
        runner.load_model()
        runner.initialize_kv_cache(plan_for(runner.get_kv_cache_spec(), num_blocks))
        return runner

    return make


@pytest.fixture
def make_accelerator(classes, make_context, platform, registry):
    """Return an accelerator's worker that is ready for steps (``ready=False``: that has loaded its
    model), on the device of this run; else on host memory that stands for one. ``mode=None``: the
    device's own.
    """
    from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps
    from hardpoint_runtime.accelerator.worker import AcceleratorWorker

    runner = "hardpoint_runtime.accelerator.model_runner:AcceleratorModelRunner"
    platform.model_runner_class = runner if classes is None else classes.runner_reference
    workers = []

    class UnitWorker(AcceleratorWorker if classes is None else classes.worker_class):
        def make_device(self):
            return SubstituteDeviceOps(1, 64 << 30) if classes is None else classes.DeviceOps()

    def make(*, num_blocks=60, ready=True, mode="none", sizes=(4, 16), **more):
        graph = GraphConfig(graph_mode=mode, graph_sizes=sizes, graph_warm_ups=0)
        context = make_context(
            graph=graph, max_num_seqs=4, max_num_batched_tokens=24,
            **{"max_model_len": 64, **more},
        )  # fmt: skip
        worker = UnitWorker(context, platform, registry)
        workers.append(worker)
        worker.init_device()
        worker.load_model()
        if ready:
            worker.initialize_from_config(plan_for(worker.get_kv_cache_spec(), num_blocks))
            worker.compile_or_warm_up_model()
        return worker

    yield make
    for worker in workers:
        worker.shutdown()


@pytest.fixture
def make_graphs(make_runner):
    """Return a warmed-up runner with graphs."""

    def make(mode, *, sizes=None, warm_ups=0, **more):
        graph = GraphConfig(graph_mode=mode, graph_sizes=sizes, graph_warm_ups=warm_ups)
        runner = make_runner(graph=graph, max_num_seqs=4, max_num_batched_tokens=24, **more)
        runner.warm_up()
        return runner

    return make


class Driver:
    """What the engine is to a runner, in few lines: plans steps and holds what requests are."""

    def __init__(self, runner, *, rng=None, num_blocks=200, block_size=4) -> None:
        self.runner = runner
        self.rng = rng
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        self.step_id = 0
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.sampling: dict[str, SamplingParams] = {}
        self.logprobs: dict[str, list] = {}
        self.pooling: dict[str, PoolingParams | None] = {}
        self.known: set[str] = set()
        self.parked: set[str] = set()
        self.lately_parked: set[str] = set()
        self.finished: set[str] = set()

    def add(
        self,
        req_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        pooling: PoolingParams | None = None,
    ):
        self.pooling[req_id] = pooling
        self.tokens[req_id] = list(prompt)
        self.num_prompt[req_id] = len(prompt)
        self.computed[req_id] = 0
        self.blocks[req_id] = []
        self.sampling[req_id] = sampling or SamplingParams(temperature=0)
        self.logprobs[req_id] = []

    def output(self, req_id: str) -> list[int]:
        return self.tokens[req_id][self.num_prompt[req_id] :]

    def preempt(self, req_id: str) -> None:
        """Take the blocks; they may be given to somebody else at once."""
        self.free += self.blocks[req_id]
        self.blocks[req_id], self.computed[req_id] = [], 0
        self.parked.add(req_id)
        self.lately_parked.add(req_id)

    def finish(self, req_id: str) -> None:
        self.free += self.blocks.pop(req_id)
        self.finished.add(req_id)
        self.known.discard(req_id)
        for table in (self.tokens, self.num_prompt, self.computed, self.sampling, self.logprobs):
            table.pop(req_id)

    def _grow(self, req_id: str, end: int) -> list[int]:
        needed = -(-end // self.block_size) - len(self.blocks[req_id])
        if self.rng is not None:
            self.rng.shuffle(self.free)
        fresh = [self.free.pop() for _ in range(needed)]
        self.blocks[req_id] += fresh
        return fresh

    def plan(self, counts: Mapping[str, int], **more) -> SchedulerOutput:
        new, rows, resumed = [], [], set()
        for req_id, count in counts.items():
            fresh = tuple(self._grow(req_id, self.computed[req_id] + count))
            if req_id not in self.known:
                new.append(
                    NewRequestData(
                        req_id=req_id,
                        prompt=tuple(self.tokens[req_id][: self.num_prompt[req_id]]),
                        sampling=self.sampling[req_id],
                        pooling=self.pooling[req_id],
                        block_ids=(fresh,),
                        num_computed=self.computed[req_id],
                    )
                )
                self.known.add(req_id)
                continue
            if req_id in self.parked:
                resumed.add(req_id)
                self.parked.remove(req_id)
            rows.append((req_id, (fresh,) if fresh else None, self.computed[req_id]))
        self.step_id += 1
        plan = SchedulerOutput(
            step_id=self.step_id,
            new=tuple(new),
            running=CachedRequestData(
                req_ids=tuple(row[0] for row in rows),
                new_blocks=tuple(row[1] for row in rows),
                num_computed=tuple(row[2] for row in rows),
                num_output=tuple(len(self.output(row[0])) for row in rows),
                resumed=frozenset(resumed),
            ),
            num_tokens=dict(counts),
            total_tokens=sum(counts.values()),
            finished=frozenset(self.finished),
            preempted=frozenset(self.lately_parked & self.known),
            **more,
        )
        self.finished, self.lately_parked = set(), set()
        return plan

    def take(self, plan: SchedulerOutput, output) -> None:
        for req_id, tokens in zip(output.req_ids, output.tokens, strict=True):
            self.computed[req_id] += plan.num_tokens[req_id]
            self.tokens[req_id] += tokens
            if req_id in output.logprobs:
                self.logprobs[req_id].append(output.logprobs[req_id])

    def step(self, counts: Mapping[str, int], **more):
        plan = self.plan(counts, **more)
        output = self.runner.execute_model(plan)
        self.take(plan, output)
        return output

    def left(self, req_id: str) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens[req_id]) - self.computed[req_id]

    def run(self, num_output: int, *, chunk: int | None = None) -> dict[str, list[int]]:
        """Step all requests until each has ``num_output`` tokens."""
        while busy := [r for r in self.tokens if len(self.output(r)) < num_output]:
            self.step({r: min(self.left(r), chunk or 10_000) for r in busy})
        return {req_id: self.output(req_id) for req_id in self.tokens}


@pytest.fixture
def make_driver() -> type[Driver]:
    return Driver
