"""Scheduling sleeps and wakes as memory does, under a tag of its own."""

from __future__ import annotations

import threading
import time

import pytest
from hardpoint.errors import InvalidRequestError, UnsupportedError
from hardpoint.sleep import SleepStateError
from hardpoint_engine import LLM, SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=8)
KEYS = {"platform": "dummy", "load_format": "dummy", "max_model_len": 256}


@pytest.fixture
def llm():
    with LLM(**KEYS) as llm:
        yield llm


@pytest.fixture
def expected(llm) -> list[int]:
    return ids(llm)


def ids(llm) -> list[int]:
    return llm.generate("one", SHORT)[0].outputs[0].token_ids


class Waiting:
    """A request of another thread."""

    def __init__(self, llm) -> None:
        self.tokens: list[int] = []
        self._thread = threading.Thread(target=lambda: self.tokens.extend(ids(llm)))
        self._thread.start()
        deadline = time.monotonic() + 30
        while not len(llm.core.scheduler.roster) and time.monotonic() < deadline:
            time.sleep(0.001)

    def end(self) -> list[int]:
        self._thread.join(30)
        return self.tokens


@pytest.mark.parametrize("level", [0, 1])
def test_a_request_waits_while_the_engine_sleeps(llm, expected, level):
    llm.sleep(level)
    assert llm.core.paused
    assert bool(llm.executor.sleeping_tags) == bool(level)
    steps = llm.metrics.steps
    waiting = Waiting(llm)
    for _ in range(3):
        llm.core.step()
    assert llm.metrics.steps == steps
    llm.wake_up()
    assert not llm.core.paused
    assert waiting.end() == expected


def test_a_step_in_flight_lands_when_the_engine_pauses(llm, expected):
    stream = llm.stream("one", SHORT)
    first = next(stream).outputs[0].token_ids
    llm.sleep(0)
    assert not llm.executor.sleeping_tags
    llm.wake_up(["scheduling"])
    rest = list(stream)
    assert rest[-1].outputs[0].token_ids == expected
    assert expected[: len(first)] == first


def test_scheduling_resumes_only_when_all_memory_is_there(llm, expected):
    llm.sleep(1)
    for tags in (["scheduling"], ["weights", "scheduling"]):
        with pytest.raises(SleepStateError, match="scheduling"):
            llm.wake_up(tags)
        assert llm.core.paused
    llm.wake_up(["kv_cache"])
    assert not llm.executor.sleeping_tags
    assert llm.core.paused
    llm.wake_up(["scheduling"])
    assert ids(llm) == expected


def test_after_level_2_the_weights_come_first(llm, expected, caplog):
    llm.sleep(2)
    llm.wake_up()
    assert llm.core.paused
    assert "scheduling stays paused" in caplog.text
    with pytest.raises(SleepStateError):
        llm.wake_up(["scheduling"])
    llm.core.reload_weights()
    llm.wake_up(["scheduling"])
    assert ids(llm) == expected


@pytest.mark.parametrize("level", [-1, 3, "1", None, True])
def test_other_levels_are_refused(llm, level):
    with pytest.raises(InvalidRequestError, match="level must be one of 0, 1, 2"):
        llm.sleep(level)
    assert not llm.core.paused


@pytest.mark.parametrize("tags", [[], ["weight"], "scheduler"])
def test_other_tags_are_refused(llm, tags):
    with pytest.raises(InvalidRequestError, match="tags must be some of weights, kv_cache"):
        llm.wake_up(tags)


def test_waking_twice_and_pausing_twice_change_nothing(llm, expected):
    llm.sleep(0)
    llm.sleep(0)
    llm.wake_up()
    llm.wake_up()
    assert ids(llm) == expected


def test_an_engine_that_cannot_sleep_goes_on(llm, expected, monkeypatch):
    def refuse(*_):
        raise UnsupportedError("sleep", "this platform")

    monkeypatch.setattr(llm.executor, "sleep", refuse)
    with pytest.raises(UnsupportedError):
        llm.sleep(1)
    assert not llm.core.paused
    assert ids(llm) == expected
    llm.sleep(0)
    with pytest.raises(UnsupportedError):
        llm.sleep(1)
    assert llm.core.paused
