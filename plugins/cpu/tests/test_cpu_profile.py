"""Profiles of steps: a trace file for each worker, each step named in it."""

from __future__ import annotations

import json
import logging

import pytest
from hardpoint.errors import ConfigError, InvalidRequestError, RemoteError
from hardpoint.messages import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine import LLM
from hardpoint_runtime.profiling import step_name

KEYS = {
    "platform": "cpu", "load_format": "dummy", "num_kv_blocks": 32, "max_model_len": 128,
    "plugins": {"cpu": {"native": "off"}},  # a native program's step is one call, without names
}  # fmt: skip
SHORT = SamplingParams(temperature=0, max_tokens=4)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(**KEYS, profile_folder=str(folder)) as llm:
        yield llm


def names(path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if "name" in event]


def steps(path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    found = [
        event for event in events if event.get("ph") == "X" and event["name"].startswith("context ")
    ]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def test_a_trace_has_each_step_by_its_name_and_the_attention(llm, folder):
    llm.start_profile("run")
    llm.generate(PROMPT, SHORT)
    llm.start_profile("another")  # ignored: one is active
    llm.generate([PROMPT, PROMPT], SHORT)
    llm.stop_profile()
    path = folder / "run-rank-0.json"
    assert list(folder.iterdir()) == [path]
    assert steps(path) == [
        "context 3 / generation 0", *["context 0 / generation 1"] * 3,
        "context 6 / generation 0", *["context 0 / generation 2"] * 3,
    ]  # fmt: skip
    assert "aten::scaled_dot_product_attention" in names(path)


def test_each_worker_writes_a_file(tmp_path):
    with LLM(**KEYS, executor="mp", tensor_parallel_size=2, profile_folder=str(tmp_path)) as llm:
        llm.start_profile("shard")
        llm.generate(PROMPT, SHORT)
        llm.stop_profile()
    for rank in range(2):
        path = tmp_path / f"shard-rank-{rank}.json"
        assert steps(path) == ["context 3 / generation 0", *["context 0 / generation 1"] * 3]
        assert "aten::scaled_dot_product_attention" in names(path)


def test_steps_are_passed_over_and_limited(llm, folder):
    llm.start_profile("part", delay_iterations=1, max_iterations=2)
    llm.generate(PROMPT, SHORT)
    path = folder / "part-rank-0.json"  # written by its limit
    assert steps(path) == ["context 0 / generation 1"] * 2
    llm.start_profile("next", max_iterations=1)
    llm.generate(PROMPT, SHORT)
    assert len(steps(folder / "next-rank-0.json")) == 1


def test_a_stop_without_a_start_warns(llm, folder, caplog):
    before = set(folder.iterdir())
    with caplog.at_level(logging.WARNING):
        llm.stop_profile()
    assert "there is none to stop" in caplog.text
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("prefix", ["", "a/b", "../a", ".hidden", "a\0"])
def test_a_wrong_prefix_is_refused(llm, folder, prefix):
    before = set(folder.iterdir())
    with pytest.raises(InvalidRequestError, match="prefix"):
        llm.start_profile(prefix)
    assert set(folder.iterdir()) == before


def test_a_profile_that_is_active_is_written_at_the_end(tmp_path):
    with LLM(**KEYS, profile_folder=str(tmp_path / "new")) as llm:
        llm.start_profile()
        llm.generate(PROMPT, SHORT)
    assert len(steps(tmp_path / "new" / "trace-rank-0.json")) == 4


def test_without_a_folder_it_is_an_error_that_names_the_key():
    with LLM(**KEYS) as llm:
        with pytest.raises(RemoteError) as caught:
            llm.start_profile()
        assert isinstance(caught.value.__cause__, ConfigError)
        assert "profile_folder is not set" in str(caught.value)
        assert len(llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids) == 4


def test_a_step_s_name_tells_prompts_from_answers():
    new = NewRequestData(req_id="a", prompt=(1,) * 5, sampling=SHORT, block_ids=((1,),))
    running = CachedRequestData(
        req_ids=("b", "c"), new_blocks=(None, None), num_computed=(4, 9), num_output=(0, 3)
    )
    plan = SchedulerOutput(
        step_id=1, new=(new,), running=running, num_tokens={"a": 5, "b": 1, "c": 1}, total_tokens=7
    )
    assert step_name(plan) == "context 6 / generation 1"


@pytest.mark.parametrize("resumed", [frozenset("a"), frozenset()], ids=["first", "later chunk"])
def test_what_is_computed_again_after_a_preemption_is_context(resumed):
    running = CachedRequestData(
        req_ids=("a", "b"), new_blocks=(None, None), num_computed=(4, 9), num_output=(6, 2),
        resumed=resumed,
    )  # fmt: skip
    plan = SchedulerOutput(step_id=1, running=running, num_tokens={"a": 8, "b": 1}, total_tokens=9)
    assert step_name(plan) == "context 8 / generation 1"
