"""A real model in shards and stages, over executors of several workers: what each rank has of it,
of the KV cache, and on the disk (rows X9, X15 to X17, case E15).
"""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np
import pytest
from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.checkpoints.sharded_state import MANIFEST
from hardpoint.config.loading import load_config
from hardpoint.errors import CheckpointError, ConfigError, RemoteError
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.build import start_engine
from hardpoint_engine.request import EngineRequest

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_hidden_layers": 5,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
"""Nothing here is a multiple of two shards or stages."""
PROMPTS = {"a": (5, 6, 7), "b": tuple(range(20, 60)), "c": (9,)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with random weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    table, body = {}, b""
    for name, shape in expected_shapes(read_description(folder, "dummy")).items():
        source = np.random.default_rng(zlib.crc32(name.encode()))
        data = source.standard_normal(shape).astype("<f4").tobytes()
        span = [len(body), len(body) + len(data)]
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": span}
        body += data
    header = json.dumps(table).encode()
    raw = struct.pack("<Q", len(header)) + header + body
    (folder / "model.safetensors").write_bytes(raw)
    return str(folder)


class Engines:
    """Starts engines of one flavour on the processor, and ends them."""

    def __init__(self, model, executor):
        self.model = model
        self.executor = executor
        self.started = []

    def __call__(self, tensor=1, stages=1, **keys):
        settings = {
            "model": self.model,
            "platform": "cpu",
            "executor": self.executor,
            "block_size": 4,
            "num_kv_blocks": 65,
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "max_num_batched_tokens": 64,
            **keys,
        }
        config = load_config(overrides=settings, environ={})
        self.started.append(start_engine(config, registry=Registry.discover(config)))
        return self.started[-1]


@pytest.fixture
def engines(model, threads_executor):
    """Engines whose ranks are threads of this process."""
    made = Engines(model, threads_executor)
    yield made
    for each in made.started:
        each.shutdown()


@pytest.fixture
def processes(model):
    """Engines whose ranks are processes."""
    made = Engines(model, "mp")
    yield made
    for each in made.started:
        each.shutdown()


def answers(core):
    """Greedy tokens of every prompt."""
    for req_id, prompt in PROMPTS.items():
        sampling = SamplingParams(temperature=0, max_tokens=6)
        core.add_request(
            EngineRequest(req_id=req_id, prompt=prompt, sampling=sampling, arrival=0.0)
        )
    tokens = dict.fromkeys(PROMPTS, ())
    while core.has_unfinished():
        for output in core.step():
            assert output.error is None
            tokens[output.req_id] += output.new_tokens
    return tokens


def test_saved_and_loaded_it_is_the_same(engines, tmp_path):
    core = engines(2, 2)
    expected = answers(core)
    files = core.executor.save_sharded_state(str(tmp_path), max_size=20_000)
    assert len(files) == 4
    assert all(len(mine) > 1 for mine in files)
    held = core.executor.apply_model(elements)
    core.shutdown()

    again = engines(2, 2, model=str(tmp_path))
    assert again.description.format == "sharded_state"
    assert again.executor.apply_model(elements) == held
    assert answers(again) == expected
    again.executor.save_sharded_state(str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {MANIFEST} | {f"model-pp-{p}-tp-{t}-part-0.safetensors" for p, t in PLACES}


def test_saved_by_processes_it_is_the_same(processes, tmp_path):
    core = processes(3, 1)
    expected, held = answers(core), core.executor.apply_model(elements)
    core.executor.save_sharded_state(str(tmp_path), pattern="{rank}.{part}")
    core.shutdown()
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, "0.0", "1.0", "2.0"}
    again = processes(3, 1, model=str(tmp_path))
    assert again.executor.apply_model(elements) == held
    assert answers(again) == expected


PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]


def elements(model):
    """Name -> shape and sum of every weight that this rank has."""
    return {
        name: (tuple(slot.view().shape), float(slot.view().double().sum()))
        for name, slot in model.weight_slots().items()
    }


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_ranks_have_the_model_between_them(engines, model):
    """Norms are on every shard; the tied embedding on the first stage and on the last."""
    shapes = expected_shapes(read_description(model))
    whole = sum(int(np.prod(shape)) for shape in shapes.values())
    embedding = int(np.prod(shapes["model.embed_tokens.weight"]))
    norms = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    core = engines(2, 2)
    assert sum(core.executor.apply_model(count)) == whole + embedding + norms


@pytest.mark.parametrize(
    ("tensor", "stages", "wrong"),
    [(1, 2, "tensor_parallel_size"), (2, 1, "pipeline_parallel_size"), (1, 1, "tensor")],
)
def test_another_number_of_ranks_is_refused_before_anything_starts(
    engines, tmp_path, tensor, stages, wrong, monkeypatch
):
    core = engines(2, 2)
    core.executor.save_sharded_state(str(tmp_path))
    monkeypatch.setattr(type(core.executor), "start_workers", lambda self: 1 / 0)
    with pytest.raises(ConfigError, match=rf"{wrong}.*saved by 2 tensor shards and 2 pipeline"):
        engines(tensor, stages, model=str(tmp_path))


def test_a_missing_part_is_named_before_anything_starts(engines, tmp_path, monkeypatch):
    core = engines(1, 2)
    files = core.executor.save_sharded_state(str(tmp_path))
    (tmp_path / files[1][0].name).unlink()
    monkeypatch.setattr(type(core.executor), "start_workers", lambda self: 1 / 0)
    with pytest.raises(CheckpointError, match=rf"{files[1][0].name}.*missing.*layers\.3"):
        engines(1, 2, model=str(tmp_path))


def test_a_part_that_changed_ends_the_start_by_the_rank_that_reads_it(engines, tmp_path):
    core = engines(1, 2)
    files = core.executor.save_sharded_state(str(tmp_path))
    core.shutdown()
    path = tmp_path / files[1][0].name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(RemoteError, match="not those that were saved") as caught:
        engines(1, 2, model=str(tmp_path))
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, CheckpointError)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 2), (3, 1)])
def test_every_rank_has_its_layers_and_heads_and_as_many_blocks(engines, tensor, stages):
    """Uneven stages and shards: the rank where a block is dearest decides."""
    core = engines(tensor, stages, num_kv_blocks=None, kv_cache_memory_bytes=100_000)
    specs = core.executor.get_kv_cache_specs()
    layers = [range(5)] if stages == 1 else [range(3), range(3, 5)]
    heads = {2: [2, 1], 3: [1, 1, 1]}[tensor]
    for rank, mine in enumerate(specs):
        stage, shard = divmod(rank, tensor)
        assert list(mine) == [f"model.layers.{index}.self_attn" for index in layers[stage]]
        assert {spec.num_kv_heads for spec in mine.values()} == {heads[shard]}
    plan = core.kv_plan
    assert {config.num_blocks for config in plan.configs} == {plan.num_blocks}
    used = [sum(each.num_bytes for each in config.tensors) for config in plan.configs]
    dearest = max(used) // plan.num_blocks
    assert max(used) <= 100_000 < max(used) + dearest
    held = core.executor.collective_rpc(cache_bytes)
    assert held == used
    assert answers(core)


def cache_bytes(worker):
    """Bytes of the KV cache that this rank has allocated."""
    caches = worker.get_model_runner().kv_cache.layers.values()
    return sum(cache.key.nbytes + cache.value.nbytes for cache in caches)


class BrokenError(RuntimeError):
    """What a stage raises."""


def break_step(worker, rank, step_id, where):
    """Let one rank fail in one step: before its part of the model runs, or after."""
    runner = worker.get_model_runner()
    if worker.rank != rank:
        return
    forward, prepare = runner.forward, runner.prepare

    def fail_after(inputs, plan):
        out = forward(inputs, plan)
        if plan.step_id == step_id:
            raise BrokenError(f"broken {where}")
        return out

    def fail_before(plan):
        if plan.step_id == step_id:
            raise BrokenError(f"broken {where}")
        return prepare(plan)

    if where == "before":
        runner.prepare = fail_before
    else:
        runner.forward = fail_after


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stage_that_fails_in_a_step_spoils_no_other(engines, rank, where):
    """Steps behind it are in flight, and have as many tokens: nothing else tells them apart."""
    expected = answers(engines(1, 3))
    core = engines(1, 3)
    core.executor.collective_rpc(break_step, args=(rank, 6, where))
    for req_id, prompt in PROMPTS.items():
        sampling = SamplingParams(temperature=0, max_tokens=6)
        core.add_request(
            EngineRequest(req_id=req_id, prompt=prompt, sampling=sampling, arrival=0.0)
        )
    tokens, failed = dict.fromkeys(PROMPTS, ()), {}
    while core.has_unfinished():
        for output in core.step():
            tokens[output.req_id] += output.new_tokens
            if output.error is not None:
                failed[output.req_id] = output.error
    assert len(failed) == 1
    (error,) = failed.values()
    assert isinstance(error, RemoteError)
    assert f"broken {where}" in str(error), "also where a later stage spoke first"
    for req_id, got in tokens.items():
        assert got == expected[req_id][: len(got)]
        assert (len(got) == 6) != (req_id in failed)
    assert answers(core) == expected
