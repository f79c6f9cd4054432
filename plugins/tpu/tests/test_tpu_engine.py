"""Through the whole house: engine, executor, worker; in this process and in one of its own."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.errors import UnsupportedError
from hardpoint.sleep import SleepStateError
from hardpoint_engine import LLM, SamplingParams

HARDPOINT = Path(sys.executable).with_name("hardpoint")
LABEL = "XLA on CPU; never run on a TPU"
FEW = {"request_buckets": (4,), "token_buckets": (64,)}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def start(program_folder):
    """Start an engine over the dummy model."""

    def make(executor="uni", settings=None, **more) -> LLM:
        options = {
            "backend": "cpu", "request_buckets": (1, 4), "token_buckets": (16, 64),
            "compilation_cache": program_folder, "memory_bytes": 1 << 28,
        }  # fmt: skip
        return LLM(
            load_format="dummy", platform="tpu", executor=executor, seed=3, num_kv_blocks=40,
            max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
            plugins={"tpu": options | (settings or {})}, **more,
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def engine(start):
    """One for the tests that leave nothing behind."""
    with start() as llm:
        yield llm


def ids(results) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


PROMPTS = ["one", "a longer prompt that fills more than a tile of sixteen bytes", "x" * 50, "two"]


@pytest.fixture(scope="module")
def expected(engine) -> list[list[int]]:
    return ids(engine.generate(PROMPTS, GREEDY))


def test_answers_are_those_of_the_cpu_platform(engine, expected):
    params = [GREEDY, GREEDY, SamplingParams(temperature=1, seed=5, max_tokens=6), GREEDY]
    ours = ids(engine.generate(PROMPTS, params))
    before = engine.metrics.cached_tokens
    assert ids(engine.generate(PROMPTS, params)) == ours
    assert engine.metrics.cached_tokens > before
    with LLM(load_format="dummy", platform="cpu", executor="uni", seed=3, max_model_len=128) as cpu:
        assert ids(cpu.generate(PROMPTS, params)) == ours
    assert [ours[index] == expected[index] for index in (0, 1, 3)] == [True] * 3


@pytest.mark.parametrize("platform", ["tpu", "cpu", "dummy"])
def test_scores_mean_the_same_on_every_platform(start, platform):
    """Token, then the best ones, whose ranks are 1 and 2, then the listed others, which have none;
    the token's own rank counts its equals.
    """
    more = {"temperature": 2, "seed": 3, "max_tokens": 4, "ignore_eos": True}
    listed = [3, 200, 100, 3]
    asks = [
        SamplingParams(logprobs=-1, **more),
        SamplingParams(logprobs=2, logprob_token_ids=listed, **more),
        SamplingParams(logprob_token_ids=listed, **more),
    ]
    common = {"load_format": "dummy", "executor": "uni", "seed": 3, "max_model_len": 128}
    started = (
        start(max_logprobs=-1)
        if platform == "tpu"
        else LLM(platform=platform, max_logprobs=-1, **common)
    )
    with started as llm:
        whole, both, only = [result.outputs[0] for result in llm.generate(["one"] * 3, asks)]
    assert whole.token_ids == both.token_ids == only.token_ids
    for place, token in enumerate(whole.token_ids):
        full = {each: score.logprob for each, score in whole.logprobs[place].items()}
        order = sorted(full, key=lambda each: (-full[each], each))
        own = sum(value >= full[token] for value in full.values())
        others = [each for each in order if each in listed]
        expected = {token: own} | {each: order.index(each) + 1 for each in order[:2]}
        expected[token] = own
        expected |= {each: None for each in others if each not in expected}
        got = both.logprobs[place]
        assert {each: score.rank for each, score in got.items()} == expected
        assert list(got) == list(expected)
        expected = {token: own} | {each: None for each in others if each != token}
        assert [(each, score.rank) for each, score in only.logprobs[place].items()] == [
            *expected.items()
        ]
        for each, score in got.items():
            assert score.logprob == pytest.approx(full[each], abs=1e-5)


MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@pytest.mark.parametrize("platform", ["tpu", "cpu", "dummy"])
def test_what_scores_are_of_is_the_same_on_every_platform(start, platform):
    """Of the model's logits, or of those that a token is chosen from; normalised or not."""
    more = {"logprobs": -1, "max_tokens": 2, "ignore_eos": True, "logit_bias": {7: 5, 9: -4}}
    asks = [
        SamplingParams(temperature=0, **more),
        SamplingParams(temperature=0.5, seed=3, **more),
        SamplingParams(temperature=1.5, seed=4, top_k=5, top_p=0.9, **more),
    ]
    common = {"load_format": "dummy", "executor": "uni", "seed": 3, "max_model_len": 128}
    scores = {}
    for mode in MODES:
        keys = {"max_logprobs": -1, "logprobs_mode": mode}
        started = (
            start(settings=FEW, **keys)
            if platform == "tpu"
            else LLM(platform=platform, **keys, **common)
        )
        with started as llm:
            answers = [result.outputs[0] for result in llm.generate(["one"] * 3, asks)]
        scores[mode] = [
            [{token: score.logprob for token, score in row.items()} for row in answer.logprobs]
            for answer in answers
        ]
    for index, ask in enumerate(asks):
        logprobs, logits, chosen, left = (scores[mode][index][0] for mode in MODES)
        assert logprobs == pytest.approx(normal(logits), abs=1e-4)
        assert chosen == pytest.approx(normal(left), abs=1e-4)
        heat = ask.temperature or 1
        edited = {
            token: (each + more["logit_bias"].get(token, 0)) / heat
            for token, each in logits.items()
        }
        kept = {token for token, value in left.items() if value > -math.inf}
        assert len(kept) == len(logits) if index < 2 else 1 <= len(kept) <= 5
        assert {each: left[each] for each in kept} == pytest.approx(
            {each: edited[each] for each in kept}, abs=1e-3
        )
        assert min(edited[each] for each in kept) >= max(
            (edited[each] for each in edited if each not in kept), default=-math.inf
        )


def normal(logits):
    """Return log-probabilities by token."""
    total = math.log(sum(map(math.exp, logits.values())))
    return {token: value - total for token, value in logits.items()}


def test_bad_words_and_the_least_length_hold(engine):
    plain = engine.generate(["ab"], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    word = plain.text[0]
    params = SamplingParams(temperature=0, max_tokens=8, bad_words=[word], min_tokens=8)
    other = engine.generate(["ab"], params)[0].outputs[0]
    assert word not in other.text
    assert len(other.token_ids) == 8


def test_an_answer_has_the_form_that_was_asked_for(engine):
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=9, structured_outputs=form)
        for seed, form in enumerate([{"regex": "[0-9]{3}"}, {"choice": ["yes", "no"]}] * 2)
    ]
    texts = [result.outputs[0].text for result in engine.generate(PROMPTS, params)]
    assert all(re.fullmatch("[0-9]{3}", text) for text in texts[::2])
    assert set(texts[1::2]) <= {"yes", "no"}


def test_log_probabilities_of_prompts_are_refused(engine):
    with pytest.raises(UnsupportedError, match="'tpu' does not support prompt logprobs"):
        engine.generate(["ab"], SamplingParams(prompt_logprobs=1))


NEVER = {"rpc.pickle": "never"}
"""The reports of the plugin travel even so."""


def test_sleep_reload_and_wake_through_the_engine(start, expected):
    with start(settings=FEW, **NEVER) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
        executor = llm.core.executor
        executor.sleep(1)
        with pytest.raises(SleepStateError, match="weights awake"):
            llm.generate(PROMPTS, GREEDY)
        executor.wake_up()
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
        executor.sleep(2)
        executor.wake_up()
        with pytest.raises(SleepStateError, match="reload_weights"):
            llm.generate(PROMPTS, GREEDY)
        executor.reload_weights()
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
        (report,) = llm.collective_rpc("program_report")
        assert report.traces == report.shapes


def test_as_many_devices_in_one_worker_give_the_same_answers(start, expected):
    with start(settings=FEW, tensor_parallel_size=2) as llm:
        assert llm.core.executor.world_size == 1
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_worker_in_a_process_of_its_own_takes_as_many_devices(start, expected):
    with start("mp", settings=FEW, tensor_parallel_size=2, **NEVER) as llm:
        assert llm.core.executor.world_size == 1
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
        (memory,) = llm.collective_rpc("memory_report")
        assert memory.label == LABEL


def test_the_command_line_answers_and_compiles_nothing_twice(engine, program_folder):
    """With as many virtual devices as this process has; a program is kept for their number."""
    (report,) = engine.collective_rpc("program_report")
    done = subprocess.run(
        [str(HARDPOINT), "generate", "--platform", "tpu", "--load-format",
         "dummy", "--raw", "--max-tokens", "3", "--log-level", "info",
         "--set", "plugins.tpu.backend=cpu", "--set", "plugins.tpu.request_buckets=1,4",
         "--set", "plugins.tpu.token_buckets=16,64", "--num-kv-blocks", "40",
         "--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
         "--set", f"plugins.tpu.compilation_cache={program_folder}", "one"],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert LABEL in done.stderr
    assert "on platform tpu, executor uni" in done.stderr
    assert f"{report.asked} of them from" in done.stderr
