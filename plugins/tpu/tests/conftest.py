"""A tiny Llama, a folder for compiled programs that the whole session shares, and a small driver.

Three virtual devices are asked for here, before anything starts JAX in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from attrs import evolve
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.messages import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint_tpu.platform import TpuPlatform
from hardpoint_tpu.settings import TpuSettings
from hardpoint_tpu.worker import TpuWorker

if jax.config.jax_num_cpu_devices < 3:
    jax.config.update("jax_num_cpu_devices", 3)

ROWS, TOKENS = (1, 4), (16, 64)
BLOCKS = 60


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory) -> str:
    """Compiled programs of the session: most workers of the tests have the same shapes."""
    folder = tmp_path_factory.mktemp(f"programs{os.getpid()}")
    folder.chmod(0o700)
    return str(folder)


def tiny(**more) -> ModelDescription:
    config = {"rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    shape = {
        "path": Path("tiny"),
        "format": "dummy",
        "architecture": "LlamaForCausalLM",
        "num_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_size": 8,
        "vocab_size": 97,
        "context_length": 256,
        "stored_dtype": "float32",
        "hf_config": config | more.pop("hf_config", {}),
    }
    return ModelDescription(**(shape | more))


@pytest.fixture
def description() -> Callable[..., ModelDescription]:
    return tiny


class PlainRegistry(Registry):
    """A registry without plugins."""

    def __init__(self) -> None:
        super().__init__([])

    def model_runner_class(self, config, platform) -> str:
        return platform.model_runner_class


def plan_for(specs, num_blocks: int) -> KVCacheConfig:
    spec = next(iter(specs.values()))
    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=(KVCacheGroup(layers=tuple(specs), spec=spec),),
        tensors=tuple(
            KVCacheTensor(num_bytes=each.page_bytes * num_blocks, layers=(name,))
            for name, each in specs.items()
        ),
    )


def make_configuration(*, description=None, tensor_parallel_size=1, dtype="float32", **more):
    config = Config(
        model=ModelConfig(dtype=dtype, seed=3, max_model_len=128),
        cache=CacheConfig(block_size=more.pop("block_size", 8)),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
        scheduler=SchedulerConfig(max_num_seqs=ROWS[-1], max_num_batched_tokens=TOKENS[-1]),
        description=description or tiny(),
    )
    return evolve(config, **more)


@pytest.fixture
def make_config() -> Callable[..., Config]:
    return make_configuration


class Workers:
    """Builds workers of the tiny model, ready for steps, and shuts them down."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.made: list[TpuWorker] = []

    def __call__(self, *, settings=None, start=True, cancelled=lambda: False, **more) -> TpuWorker:
        options = {
            "backend": "cpu",
            "request_buckets": ROWS,
            "token_buckets": TOKENS,
            "compilation_cache": self.folder,
            "memory_bytes": 1 << 28,
        }
        platform = TpuPlatform(TpuSettings(**(options | (settings or {}))))
        context = WorkerContext(
            config=make_configuration(**more), rank=0, local_rank=0, world_size=1,
            cancelled=cancelled,
        )  # fmt: skip
        worker = TpuWorker(context, platform, PlainRegistry())
        self.made.append(worker)
        if start:
            worker.init_device()
            worker.load_model()
            worker.initialize_from_config(plan_for(worker.get_kv_cache_spec(), BLOCKS))
            worker.compile_or_warm_up_model()
        return worker

    def close(self) -> None:
        for worker in self.made:
            worker.shutdown()


@pytest.fixture
def make_worker(program_folder) -> Iterator[Workers]:
    workers = Workers(program_folder)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def module_workers(program_folder) -> Iterator[Workers]:
    """As ``make_worker``, for workers that the tests of one file share."""
    workers = Workers(program_folder)
    yield workers
    workers.close()


class Driver:
    """What the engine is to a worker, in few lines: plans steps and holds what requests are."""

    def __init__(self, worker, *, rng=None) -> None:
        self.worker = worker
        self.rng = rng
        self.block_size = worker.get_model_runner().requests.block_size
        self.free = list(range(1, BLOCKS))
        self.step_id = 0
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.sampling: dict[str, SamplingParams] = {}
        self.logprobs: dict[str, list] = {}
        self.known: set[str] = set()
        self.parked: set[str] = set()
        self.lately_parked: set[str] = set()
        self.finished: set[str] = set()

    def add(self, req_id: str, prompt: Sequence[int], sampling=None) -> None:
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
        self.parked.discard(req_id)
        for table in (self.tokens, self.num_prompt, self.computed, self.sampling, self.logprobs):
            table.pop(req_id)

    def left(self, req_id: str) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens[req_id]) - self.computed[req_id]

    def plan(self, counts: Mapping[str, int], **more) -> SchedulerOutput:
        new, rows, resumed = [], [], set()
        for req_id, count in counts.items():
            end = self.computed[req_id] + count
            needed = -(-end // self.block_size) - len(self.blocks[req_id])
            if self.rng is not None:
                self.rng.shuffle(self.free)
            fresh = tuple(self.free.pop() for _ in range(needed))
            self.blocks[req_id] += fresh
            if req_id not in self.known:
                self.known.add(req_id)
                new.append(
                    NewRequestData(
                        req_id=req_id,
                        prompt=tuple(self.tokens[req_id][: self.num_prompt[req_id]]),
                        sampling=self.sampling[req_id],
                        block_ids=(fresh,),
                        num_computed=self.computed[req_id],
                    )
                )
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
        output = self.worker.execute_model(plan)
        self.take(plan, output)
        return output

    def run(self, num_output: int, *, chunk: int | None = None) -> dict[str, list[int]]:
        """Step all requests until each has ``num_output`` tokens."""
        while busy := [r for r in self.tokens if len(self.output(r)) < num_output]:
            self.step({r: min(self.left(r), chunk or 10_000) for r in busy})
        return {req_id: self.output(req_id) for req_id in self.tokens}


@pytest.fixture
def drive() -> type[Driver]:
    return Driver


class DenseLlama:
    """The reference: a Llama over whole sequences, in numpy and float64, without any cache."""

    def __init__(self, description: ModelDescription, tensors: Mapping[str, np.ndarray]) -> None:
        self.description = description
        self.tensors = {name: np.asarray(each, np.float64) for name, each in tensors.items()}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return [n, V]."""
        of, shape = self.tensors, self.description
        x = of["model.embed_tokens.weight"][list(tokens)]
        for index in range(shape.num_layers):
            prefix = f"model.layers.{index}."
            x = x + self._attention(prefix, self._norm(x, prefix + "input_layernorm"))
            h = self._norm(x, prefix + "post_attention_layernorm")
            gate, up = (
                self._linear(h, prefix + "mlp.gate_proj"),
                self._linear(h, prefix + "mlp.up_proj"),
            )
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "mlp.down_proj")
        head = of.get("lm_head.weight", of["model.embed_tokens.weight"])
        return self._norm(x, "model.norm") @ head.T

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _linear(self, x, name):
        out = x @ self.tensors[name + ".weight"].T
        return out + self.tensors.get(name + ".bias", 0)

    def _norm(self, x, name):
        eps = self.description.hf_config["rms_norm_eps"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.tensors[name + ".weight"]

    def _attention(self, prefix, x):
        shape = self.description
        n, size = len(x), shape.head_size
        q, k, v = (
            self._linear(x, f"{prefix}self_attn.{part}_proj").reshape(n, -1, size) for part in "qkv"
        )
        turned = np.arange(n)[:, None] / shape.hf_config["rope_theta"] ** (
            np.arange(0, size, 2) / size
        )
        cos, sin = (np.concatenate((f(turned), f(turned)), -1)[:, None] for f in (np.cos, np.sin))

        def rotate(x):
            half = size // 2
            return x * cos + np.concatenate((-x[..., half:], x[..., :half]), -1) * sin

        group = shape.num_heads // shape.num_kv_heads
        q, k, v = rotate(q), rotate(k).repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
        return self._linear(out, f"{prefix}self_attn.o_proj")


@pytest.fixture
def dense() -> Callable[..., DenseLlama]:
    def make(worker) -> DenseLlama:
        model = worker.get_model()
        return DenseLlama(model.description, dict(model.tensors()))

    return make


def pytest_collection_modifyitems(items):
    """Leave what compiles shapes of its own to the slow lane."""
    for item in items:
        if item.name.startswith(("test_the_default_model", "test_two_that_share_each_layer_give")):
            item.add_marker(pytest.mark.slow)
