"""The engine's own thread: callers may be interrupted, shut down, forked or forgotten."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time

import pytest
from attrs import evolve
from hardpoint.errors import (
    ExecutorFailedError,
    HardpointError,
    InvalidRequestError,
    LifecycleError,
)
from hardpoint_engine import LLM, SamplingParams
from hardpoint_engine.completion import Generation

SHORT = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=60)


def start(**keys) -> LLM:
    return LLM(**{"platform": "dummy", "load_format": "dummy", "max_model_len": 256} | keys)


def ids(results) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def llm():
    with start() as llm:
        yield llm


def engine_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("hardpoint-engine", "hardpoint-uni")]


def test_a_storm_of_interrupts_tears_nothing():
    """Interrupts at random places of the main thread; a neighbour's tokens stay right, and so do
    those of the next call.
    """
    prompts = [[number, number + 1, number + 2] for number in range(8)]
    draw = random.Random(5)
    wrong: list[list[int]] = []
    done = threading.Event()
    with start(num_kv_blocks=40, max_num_batched_tokens=32) as llm:
        expected = ids(llm.generate(prompts, LONG))

        def neighbour() -> None:
            while not done.is_set():
                wrong.extend(
                    tokens
                    for tokens in ids(llm.generate(prompts[:1], LONG))
                    if tokens != expected[0]
                )

        thread = threading.Thread(target=neighbour)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        thread.start()
        interrupts = 0
        try:
            while interrupts < 60:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0005, 0.01))
                    try:
                        llm.generate(prompts, LONG)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupts += 1
        finally:
            signal.signal(signal.SIGALRM, before)
            done.set()
            thread.join()
        assert not wrong
        assert ids(llm.generate(prompts, LONG)) == expected
        assert not llm.core.has_unfinished()


def test_a_shutdown_ends_other_threads_calls_by_an_error():
    llm = start(plugins={"dummy": {"step_seconds": 0.02}})
    stepping = threading.Event()
    raised: list[BaseException] = []

    def work() -> None:
        stepping.set()
        try:
            llm.generate(["a"] * 4, SamplingParams(temperature=0, max_tokens=200))
        except HardpointError as error:
            raised.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    stepping.wait()
    next(llm.stream("b", LONG))
    llm.shutdown()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in raised] == [ExecutorFailedError] * 2
    assert "shut down" in str(raised[0])


def test_every_waiting_caller_hears_once_what_a_step_raised():
    with start() as llm:
        llm.executor.sleep()
        for _ in range(2):
            with pytest.raises(HardpointError, match="sleep"):
                llm.generate("a", SHORT)
        llm.executor.wake_up()
        assert len(ids(llm.generate("a", SHORT))[0]) == 8


def test_nothing_stays_of_an_engine_that_is_forgotten_or_shut_down():
    gc.collect()
    before = engine_threads()
    llm = start()
    llm.generate("a", SHORT)
    stream = llm.stream("a", LONG)
    next(stream)
    assert len(engine_threads()) == len(before) + 2
    del llm, stream
    gc.collect()
    deadline = time.monotonic() + 10
    while engine_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine_threads() == before
    with start() as llm:
        llm.generate("a", SHORT)
    assert engine_threads() == before


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on():
    with start() as llm:
        expected = ids(llm.generate("a", SHORT))
        stream = llm.stream("a", SHORT)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            refused = 0
            for call in (
                lambda: llm.generate("a", SHORT),
                lambda: llm.stream("a", SHORT),
                lambda: next(stream),
                lambda: llm.abort("0"),
            ):
                with contextlib.suppress(BaseException):
                    try:
                        call()
                    except LifecycleError:
                        refused += 1
            llm.shutdown()
            os._exit(refused)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        assert ids(llm.generate("a", SHORT)) == expected
        assert ids(list(stream)[-1:]) == expected


def test_many_answers_are_aborted_in_time_linear_in_their_number():
    with start() as llm:
        most = SamplingParams(temperature=1, n=4096, max_tokens=100)
        stream = llm.stream("a", most)
        next(stream)
        begun = time.process_time()
        llm.abort(stream.request_id)
        assert list(stream)[-1].outputs[-1].finish_reason == "abort"
        assert time.process_time() - begun < 2  # the square would take a minute
        assert not llm.core.has_unfinished()
        with pytest.raises(InvalidRequestError, match=r"n is 4097.*4096"):
            llm.generate("a", SamplingParams(temperature=1, n=4097))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate("a", 5), "must be SamplingParams, not int"),
        (lambda llm: llm.generate("a", [5]), "must be SamplingParams, not int"),
        (lambda llm: llm.stream("a", 5), "must be SamplingParams, not int"),
        (lambda llm: llm.stream(None), "text or token ids, not NoneType"),
        (lambda llm: llm.stream(b"abc"), "text or token ids, not bytes"),
        (lambda llm: llm.generate(b"abc"), "text, token ids, .* not bytes"),
        (lambda llm: llm.generate(["a", bytearray(b"abc")]), "prompt 2 of 2: .* not bytearray"),
        (lambda llm: llm.generate(None), "text, token ids, .* not NoneType"),
    ],
)
def test_wrong_types_are_told_what_is_wanted(llm, call, words):
    with pytest.raises(InvalidRequestError, match=words):
        call(llm)


class Steps:
    """What happens in an engine, in its order: a plan is sent, or text made of its outputs."""

    def __init__(self, llm, monkeypatch):
        self.plans, self.seen = [], []
        self.during = {}
        """By the number of a step: what is done when its result is there."""
        execute, commit, add = llm.executor.execute_model, llm.core.scheduler.commit, Generation.add

        def sending(plan, **options):
            self.plans.append(plan)
            self.seen.append("sent")
            return execute(plan, **options)

        def committing(plan, output):
            outputs = commit(plan, output)
            self.during.pop(len(self.plans), lambda: None)()
            return outputs

        def adding(generation, index, output):
            self.seen.append("text")
            return add(generation, index, output)

        monkeypatch.setattr(llm.executor, "execute_model", sending)
        monkeypatch.setattr(llm.core.scheduler, "commit", committing)
        monkeypatch.setattr(Generation, "add", adding)


@pytest.fixture
def steps(llm, monkeypatch):
    return Steps(llm, monkeypatch)


def test_the_next_step_is_sent_before_text_is_made_of_the_last(llm, steps):
    llm.generate("a", SamplingParams(temperature=0, max_tokens=4))
    assert steps.seen == ["sent", "sent", "text", "sent", "text", "sent", "text", "text"]


def test_no_step_is_sent_that_only_a_caller_who_does_not_wait_could_want(llm, steps):
    stream = llm.stream("a", LONG)
    for number in range(1, 4):
        next(stream)
        assert len(steps.plans) == number
    llm.generate("b", SamplingParams(temperature=0, max_tokens=4))
    assert len(steps.plans) == 7
    next(stream)
    stream.close()


def test_no_step_is_sent_for_a_request_that_its_text_may_have_ended(llm, steps):
    (whole,) = llm.generate("a", SHORT)
    steps.plans.clear()
    stop = evolve(SHORT, stop=(whole.outputs[0].text[3:5],))
    (ended,) = llm.generate("a", stop)
    assert ended.outputs[0].finish_reason == "stop"
    assert len(steps.plans) == len(ended.outputs[0].token_ids) < 8
    assert "sent sent" not in " ".join(steps.seen[-6:])


def test_requests_that_come_and_go_while_a_step_runs_do_so_in_the_next(llm, steps):
    streams = []
    steps.during = {
        3: lambda: streams.append(llm.stream("b", LONG)),
        5: lambda: llm.abort(streams[0].request_id),
    }
    llm.generate("a", SamplingParams(temperature=0, max_tokens=8))
    assert [len(plan.num_tokens) for plan in steps.plans] == [1, 1, 1, 2, 2, 1, 1, 1]
    assert len(steps.plans[3].new) == 1
    assert len(steps.plans[5].finished) == 1
    assert list(streams[0])[-1].outputs[0].finish_reason == "abort"


def test_what_keeps_a_step_from_being_sent_loses_no_text(llm, steps):
    steps.during = {3: lambda: vars(llm.core.scheduler).update(schedule=lambda: 1 / 0)}
    try:
        with pytest.raises(ZeroDivisionError):
            llm.generate("a", LONG)
    finally:
        del llm.core.scheduler.schedule
    assert steps.seen.count("text") == 3
