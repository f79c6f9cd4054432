"""A model through the interpreted kernels: tokens as with torch. Collected by
``tests/kernels/test_kernels_interpreted.py`` only: the interpreter is the process's.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hardpoint.checkpoints import read_description
from hardpoint.config.schema import GraphConfig
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.kernels import (
    blocks,
    filters,
    kv_write,
    paged_decode,
    paged_prefill,
    penalties,
    slots,
)
from hardpoint_runtime.kernels.offers import KERNELS, kernel_operations
from hardpoint_runtime.operations import HOOK
from triton import knobs

PROMPTS = {"a": [5, 9, 3, 5, 9, 3, 5], "b": [1, 2], "c": [*range(30, 60)]}


def outputs(make_runner, make_driver, registry, *, chunk=None, **more):
    """Return what three requests get, one greedy, one penalised, one drawn, with blocks moved."""
    runner = make_runner(registry=registry, **more)
    runner.warm_up()
    driver = make_driver(runner)
    driver.add("a", PROMPTS["a"])
    driver.add("b", PROMPTS["b"], SamplingParams(temperature=0, repetition_penalty=1.3))
    drawn = SamplingParams(temperature=0.9, seed=5, top_k=20, top_p=0.8, min_p=0.01)
    driver.add("c", PROMPTS["c"], drawn)
    driver.step({"a": 3, "b": 2}, blocks_to_zero=(150, 151), block_copies=((0, 150, 152),))
    return runner, driver.run(4, chunk=chunk)


@pytest.fixture
def plain(make_runner, make_driver, registry):
    """Do the same in torch, before any kernel is offered."""

    def run(**how):
        given = registry.given.pop(HOOK, ())
        found = outputs(make_runner, make_driver, registry, **how)[1]
        registry.given[HOOK] = given
        return found

    return run


@pytest.fixture
def kernels(registry):
    assert knobs.runtime.interpret
    registry.given[HOOK] = [*kernel_operations("host")]
    return registry


@pytest.fixture
def launched(monkeypatch):
    """Count the launches by kernel."""
    counts = {}
    for module, name in (
        (kv_write, "kv_write_kernel"),
        (paged_decode, "paged_decode_kernel"),
        (paged_prefill, "paged_prefill_kernel"),
        (slots, "slot_mapping_kernel"),
        (blocks, "zero_blocks_kernel"),
        (blocks, "copy_blocks_kernel"),
        (penalties, "penalise_kernel"),
        (filters, "temper_kernel"),
        (filters, "truncate_kernel"),
    ):
        monkeypatch.setattr(module, name, Counting(getattr(module, name), name, counts))
    return counts


class Counting:
    def __init__(self, kernel, name, counts):
        self.kernel, self.name, self.counts = kernel, name, counts

    def __getitem__(self, grid):
        self.counts[self.name] = self.counts.get(self.name, 0) + 1
        return self.kernel[grid]


def test_tokens_are_those_of_torch(make_runner, make_driver, kernels, launched, plain):
    runner, found = outputs(make_runner, make_driver, kernels, chunk=9)
    assert found == plain(chunk=9)
    chosen = {each.name: each.reference for each in runner.operations.choices}
    for name in KERNELS:
        assert chosen[name].startswith("hardpoint_runtime.kernels."), name
    assert len(launched) == 9
    assert all(launched.values())


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_recorded_graphs_replay_the_kernels(make_runner, make_driver, kernels, plain, mode):
    graph = GraphConfig(graph_mode=mode, graph_sizes=(1, 3, 4), graph_warm_ups=0)
    more = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
    runner, found = outputs(make_runner, make_driver, kernels, graph=graph, **more)
    assert found == plain()
    assert runner.graphs is not None


def test_windows_caps_and_odd_heads_of_a_model(
    make_runner, make_driver, kernels, launched, plain, tmp_path
):
    """Gemma 2: windows in every other layer, capped scores, heads of 24 that share keys by two."""
    path = Path(__file__).with_name("tiny_architectures.py")
    spec = importlib.util.spec_from_file_location("tiny_architectures", path)
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    description = read_description(str(tiny.save("gemma2", tmp_path, num_hidden_layers=2)))
    _, found = outputs(make_runner, make_driver, kernels, chunk=9, description=description)
    assert launched["paged_decode_kernel"]
    assert launched["paged_prefill_kernel"]
    assert found == plain(chunk=9, description=description)
