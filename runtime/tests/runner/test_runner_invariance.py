"""The same request gives the same tokens alone, in a batch, in chunks, preempted, warmed up or not.

A tiny random Llama in float32. Logits may differ in their last bits between batches, so a token
whose draw lies on an edge could differ; with these fixed seeds none does.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.model_runner import TorchModelRunner

PROMPTS = {f"r{length}": list(range(length, 2 * length)) for length in (1, 3, 8, 17, 30)}
WISHES = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.2},
]


def sampling_for(index: int) -> SamplingParams:
    return SamplingParams(**WISHES[index % len(WISHES)], seed=1000 + index, logprobs=2)


@pytest.fixture
def alone(make_runner, make_driver):
    found = {}
    runner = make_runner()
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        driver = make_driver(runner)
        driver.add(name, prompt, sampling_for(index))
        found |= driver.run(16)
        driver.finish(name)
        driver.step({})
    return found


def test_in_a_batch(make_runner, make_driver, alone):
    driver = make_driver(make_runner())
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        driver.add(name, prompt, sampling_for(index))
    assert driver.run(16) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(make_runner, make_driver, alone, chunk):
    driver = make_driver(make_runner())
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        driver.add(name, prompt, sampling_for(index))
    assert driver.run(16, chunk=chunk) == alone


def test_preempted_and_resumed(make_runner, make_driver, alone):
    driver = make_driver(make_runner())
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        driver.add(name, prompt, sampling_for(index))
    for round_ in range(16):
        driver.run(round_ + 1, chunk=9)
        driver.preempt(list(PROMPTS)[round_ % len(PROMPTS)])
    assert {name: driver.output(name) for name in PROMPTS} == alone


def test_with_other_seeds_the_tokens_differ(make_runner, make_driver, alone):
    driver = make_driver(make_runner())
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, SamplingParams(temperature=1.0, seed=5))
    assert driver.run(16)["r3"] != alone["r3"]


def test_logprobs_are_those_of_the_model(make_runner, make_driver):
    """Against the whole forward of the finished sequence, without a cache to speak of."""
    runner = make_runner()
    driver = make_driver(runner)
    driver.add("a", PROMPTS["r8"], SamplingParams(temperature=1.0, seed=9, logprobs=3))
    driver.add("b", PROMPTS["r3"])
    driver.run(6)
    tokens = driver.tokens["a"]
    found = driver.logprobs["a"]
    assert driver.logprobs["b"] == []
    for index, row in enumerate(found):
        check = make_driver(make_runner())
        check.add("x", tokens[: 8 + index], SamplingParams(temperature=0, logprobs=-1))
        check.step({"x": 8 + index})
        (whole,) = check.logprobs["x"]
        by_id = dict(zip(whole.ids[0], whole.values[0], strict=True))
        ((ids,), (values,), (rank,)) = (row.ids, row.values, row.ranks)
        assert ids[0] == tokens[8 + index]
        assert ids[1:] == whole.ids[0][1:4]
        assert values == pytest.approx([by_id[id_] for id_ in ids], abs=1e-4)
        assert rank == (whole.ids[0][1:].index(ids[0]) + 1, 1, 2, 3)


def everything(runner: TorchModelRunner):
    columns = runner.requests.columns
    return (
        {column.name: columns[column.name].copy() for column in columns.declared},
        {
            name: (cache.key.clone(), cache.value.clone())
            for name, cache in runner.kv_cache.layers.items()
        },
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        runner.requests.ids,
    )


def test_warm_up_leaves_no_trace(make_runner, make_driver, alone):
    runner = make_runner()
    before = everything(runner)
    report = runner.warm_up()
    runner.profile_run()
    assert report.language_s > 0
    after = everything(runner)
    for name, values in before[0].items():
        np.testing.assert_array_equal(values, after[0][name])
    for name, (key, value) in before[1].items():
        assert torch.equal(key, after[1][name][0])
        assert torch.equal(value, after[1][name][1])
    assert torch.equal(before[2], after[2])
    assert (before[3] == after[3]).all()
    assert before[4] == after[4] == ()
    driver = make_driver(runner)
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        driver.add(name, prompt, sampling_for(index))
    assert driver.run(16) == alone


@pytest.mark.parametrize("profiled", [True, False])
def test_warm_up_runs_what_steps_run(make_runner, monkeypatch, profiled):
    """A decode, a prefill, the largest step if no profile ran it, and sampling with and without
    cuts.
    """
    runner = make_runner()
    if profiled:
        runner.profile_run()
    lengths, sampled = [], []
    forward = type(runner.model).forward
    monkeypatch.setattr(
        type(runner.model),
        "forward",
        lambda self, ids, at, step: lengths.append(len(ids)) or forward(self, ids, at, step),
    )
    sample = runner.sampler.sample
    monkeypatch.setattr(
        runner.sampler,
        "sample",
        lambda logits, batch: sampled.append(batch.draws.top_k is None) or sample(logits, batch),
    )
    runner.warm_up()
    assert lengths == [1, 4, 16] + [64] * (not profiled)
    assert sampled == [True, False]


def test_a_profile_runs_one_layer_at_full_width(make_runner, make_context, monkeypatch):
    description = evolve(make_context().config.description, num_layers=5)
    runner = make_runner(description=description, max_num_batched_tokens=600, max_num_seqs=5)
    seen = []
    layer = type(runner.model.layers[0])
    forward = layer.forward
    monkeypatch.setattr(
        layer,
        "forward",
        lambda self, x, *args: seen.append(len(x)) or forward(self, x, *args),
    )
    rows = []
    logits = type(runner.model).compute_logits
    monkeypatch.setattr(
        type(runner.model),
        "compute_logits",
        lambda self, hidden: rows.append(len(hidden)) or logits(self, hidden),
    )
    runner.profile_run()
    assert seen == [600]  # 256 + 256 + 88 tokens of three rows
    assert rows == [5]


def test_bfloat16(make_runner, make_driver):
    driver = make_driver(make_runner(dtype="bfloat16"))
    assert next(driver.runner.model.parameters()).dtype == torch.bfloat16
    assert next(iter(driver.runner.kv_cache.layers.values())).key.dtype == torch.bfloat16
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        driver.add(name, prompt, sampling_for(index))
    assert all(len(tokens) == 16 for tokens in driver.run(16).values())
