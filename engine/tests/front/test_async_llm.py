"""The front for asyncio: the loop stays free, leaving a stream aborts, the end is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hardpoint.errors import (
    ConfigError,
    ExecutorFailedError,
    HardpointError,
    InvalidRequestError,
    UnsupportedError,
)
from hardpoint.sleep import SleepStateError
from hardpoint_engine import LLM, AsyncLLM, SamplingParams
from hardpoint_engine.engine_thread import stopped_engine

SHORT = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=200)
KEYS = {"platform": "dummy", "load_format": "dummy", "max_model_len": 256}


def slow(seconds: float) -> dict:
    return {"plugins": {"dummy": {"step_seconds": seconds}}}


async def last(stream):
    states = [state async for state in stream]
    return states[-1]


def tokens(state) -> list[int]:
    return state.outputs[0].token_ids


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**KEYS) as llm:
        return [tokens(result) for result in llm.generate([f"{i}" for i in range(300)], SHORT)]


async def settled(llm) -> None:
    """Wait until nothing is left in the engine."""
    async with asyncio.timeout(30):
        while llm.core.has_unfinished():
            await asyncio.sleep(0.005)


def engine_threads() -> list[str]:
    """Return the engine's threads that do not end. Probes that other tests left hanging in
    plugins' code are not the engine's.
    """
    deadline = time.monotonic() + 30
    while True:
        names = [thread.name for thread in threading.enumerate()]
        found = [name for name in names if name.startswith("hardpoint") and "probe" not in name]
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.005)


def test_a_stream_is_an_async_generator_that_grows_as_the_other_front_s_does(expected):
    async def main() -> None:
        async with await AsyncLLM.start(**KEYS) as llm:
            stream = llm.generate("7", SHORT)
            assert isinstance(stream, AsyncGenerator)
            assert stream.request_id is None
            states = [state async for state in stream]
            assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]
            assert tokens(states[-1]) == expected[7]
            assert stream.request_id == states[-1].request_id
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert await llm.collective_rpc(lambda worker: worker.rank, timeout=30) == [0]

    asyncio.run(main())
    assert not engine_threads()


def kept_waiting() -> float:
    """Return for how many seconds threads of this process could have run, but others had the
    processors. What a busy machine does to the loop is no fault of ours.
    """
    found = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += int(path.read_text().split()[1])
    return found / 1e9


def test_the_loop_is_free_during_a_step_of_a_second():
    """A ticker of 10 ms, through a prompt that takes long to read, and steps of a second."""

    async def main() -> list[float]:
        late: list[float] = []

        async def tick() -> None:
            while True:
                due, before = time.perf_counter() + 0.01, kept_waiting()
                await asyncio.sleep(0.01)
                late.append(time.perf_counter() - due - (kept_waiting() - before))

        async with await AsyncLLM.start(**KEYS, **slow(1.0)) as llm:
            ticker = asyncio.create_task(tick())
            read = llm._front.tokens
            llm._front.tokens = lambda prompts: (time.sleep(0.2), read(prompts))[1]
            await last(llm.generate("a" * 200, SamplingParams(temperature=0, max_tokens=1)))
            ticker.cancel()
        return late

    late = asyncio.run(main())
    assert len(late) > 20  # a loop that stands still ticks twice
    assert max(late) <= 0.05


def test_hundreds_of_requests_are_computed_together(expected):
    async def main() -> None:
        async with await AsyncLLM.start(**KEYS) as llm:
            states = await asyncio.gather(
                *(last(llm.generate(f"{number}", SHORT)) for number in range(300))
            )
            assert [tokens(state) for state in states] == expected
            assert llm.core.metrics.steps < 300  # one after the other they would be 2,400

    asyncio.run(main())


def test_a_request_goes_on_while_its_caller_does_something_else():
    async def main() -> None:
        async with await AsyncLLM.start(**KEYS) as llm:
            stream = llm.generate("a", LONG)
            first = await anext(stream)
            await settled(llm)
            second = await anext(stream)
            assert not first.finished
            assert second.finished
            assert len(tokens(second)) == 200

    asyncio.run(main())


@pytest.mark.parametrize("way", ["cancel", "break", "aclose", "athrow", "abort", "drop"])
def test_leaving_a_stream_aborts_it_and_its_neighbour_goes_on(way, expected):
    async def main() -> None:
        async with await AsyncLLM.start(**KEYS, **slow(0.02)) as llm:
            neighbour = asyncio.create_task(last(llm.generate("7", SHORT)))
            stream = llm.generate("a", LONG)
            if way == "cancel":
                begun = asyncio.Event()

                async def work() -> None:
                    async for _ in stream:
                        begun.set()

                task = asyncio.create_task(work())
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "break":
                async for _ in stream:
                    break
                del stream
                gc.collect()
            else:
                await anext(stream)
            if way == "aclose":
                await stream.aclose()
                await stream.aclose()
            elif way == "athrow":
                with pytest.raises(ZeroDivisionError):
                    await stream.athrow(ZeroDivisionError())
            elif way == "abort":
                llm.abort(stream.request_id)
                state = await last(stream)
                assert state.outputs[0].finish_reason == "abort"
            elif way == "drop":
                del stream
                gc.collect()
            assert tokens(await neighbour) == expected[7]
            await settled(llm)
            assert llm.core.metrics.generated_tokens < 200

    asyncio.run(main())


def test_a_request_that_is_left_before_it_is_queued_is_not_computed(trained, tmp_path):
    """Cancelled while its template renders."""
    trained.save(str(tmp_path / "tokenizer.json"))
    template = "{% for i in range(4000000) %}{% endfor %}{{ messages[0].content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    async def main() -> None:
        async with await AsyncLLM.start(**KEYS, tokenizer=str(tmp_path)) as llm:
            question = [{"role": "user", "content": "!"}]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await last(llm.chat(question, LONG))
            (turns,) = llm._templates._threads  # renders it
            assert tokens(await last(llm.generate("!", SHORT)))
            await asyncio.to_thread(llm._templates.shutdown)
            assert not turns.is_alive()
            await settled(llm)
            assert llm.core.metrics.generated_tokens < 150

    asyncio.run(main())


def test_a_slow_template_keeps_nobody_else_waiting(trained, tmp_path, expected):
    """Neither plain texts nor other conversations; each in a process of its own."""
    trained.save(str(tmp_path / "tokenizer.json"))
    work = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{{ messages[0].content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    question = [{"role": "user", "content": "!"}]

    async def main() -> None:
        async with await AsyncLLM.start(**KEYS, tokenizer=str(tmp_path)) as llm:
            llm._front.template._pool._time_limit = 120
            slow_one = asyncio.create_task(last(llm.chat(question, SHORT, chat_template=work)))
            while not llm._front.template._pool._busy:
                await asyncio.sleep(0.001)
            others = (llm.chat(question, SHORT), llm.generate("7", SHORT))
            answers = await asyncio.gather(*map(last, others))
            assert all(len(tokens(answer)) == 8 for answer in answers)
            assert not slow_one.done()
            slow_one.cancel()

    asyncio.run(main())
    assert not engine_threads()


def test_vectors_are_the_other_front_s():
    prompts = ["one", [1, 2, 3], "three"]
    with LLM(**KEYS) as llm:
        expected = [result.embedding for result in llm.embed(prompts, "last")]

    async def main() -> None:
        async with await AsyncLLM.start(**KEYS) as llm:
            assert await llm.embed([]) == []
            found = await llm.embed(prompts, "last")
            assert [result.embedding for result in found] == expected
            assert [result.prompt for result in found] == ["one", None, "three"]
            assert [result.embedding for result in await llm.embed("one", "last")] == expected[:1]
            with pytest.raises(InvalidRequestError, match="prompt 2 of 2"):
                await llm.embed(["a", ""])
            with pytest.raises(InvalidRequestError, match="one of mean, last, cls"):
                await llm.embed("a", "max")
            llm.executor._tasks = ("generate",)
            with pytest.raises(UnsupportedError, match="embed"):
                await llm.embed("a")

    asyncio.run(main())


def test_vectors_that_nobody_waits_for_any_more_are_not_computed():
    async def main() -> None:
        async with await AsyncLLM.start(**KEYS, **slow(0.02), max_num_seqs=1) as llm:
            work = asyncio.create_task(llm.embed(["a"] * 100))
            while not llm.core.metrics.steps:
                await asyncio.sleep(0.001)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            await settled(llm)
            assert llm.core.metrics.finished["abort"] > 50

    asyncio.run(main())


def test_a_shutdown_ends_open_streams_by_a_named_error():
    async def main() -> None:
        llm = await AsyncLLM.start(**KEYS, **slow(0.02))
        waiting = [asyncio.create_task(last(llm.generate("a", LONG))) for _ in range(3)]
        idle = llm.generate("b", LONG)
        await anext(idle)
        unused = llm.generate("c", LONG)
        await llm.shutdown()
        await llm.shutdown()
        for work in (*waiting, last(idle), last(unused)):
            with pytest.raises(ExecutorFailedError, match="was shut down; start a new one"):
                await work
        with pytest.raises(ExecutorFailedError):
            await llm.collective_rpc("supported_tasks")

    asyncio.run(main())
    assert not engine_threads()


def test_a_request_that_a_shutdown_overtakes_is_told_too():
    """It is on its way to the engine's thread, which has a step to end."""

    async def main() -> None:
        llm = await AsyncLLM.start(**KEYS)
        commands, held = llm._front.thread._commands, threading.Event()
        commands.put(held.wait)
        while not commands.empty():
            await asyncio.sleep(0.001)
        stream = llm.generate("a", SHORT)
        waiting = asyncio.create_task(anext(stream))
        while stream.request_id is None:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)  # now it sleeps
        llm._front.thread.end(stopped_engine())
        held.set()
        with pytest.raises(ExecutorFailedError):
            await asyncio.wait_for(waiting, 30)
        await llm.shutdown()

    asyncio.run(main())
    assert not engine_threads()


def test_what_is_wrong_with_one_request_is_raised_to_it_alone(expected):
    async def main() -> None:
        async with await AsyncLLM.start(**KEYS) as llm:
            good = asyncio.create_task(last(llm.generate("7", SHORT)))
            with pytest.raises(InvalidRequestError):
                await last(llm.generate("", SHORT))
            with pytest.raises(InvalidRequestError):
                await last(llm.generate("a", 5))
            with pytest.raises(InvalidRequestError, match="template"):
                await last(llm.chat([{"role": "user", "content": "x"}], SHORT))
            assert tokens(await good) == expected[7]
            llm.executor.sleep()
            with pytest.raises(SleepStateError):
                await last(llm.generate("a", SHORT))
            llm.executor.wake_up()
            assert tokens(await last(llm.generate("7", SHORT))) == expected[7]

    asyncio.run(main())


def test_a_step_that_fails_is_raised_to_its_requests(expected):
    async def main() -> None:
        keys = {"plugins": {"dummy": {"fail_at": "step:3"}}}
        async with await AsyncLLM.start(**KEYS, **keys) as llm:
            with pytest.raises(HardpointError):
                await last(llm.generate("7", SHORT))
            assert tokens(await last(llm.generate("7", SHORT))) == expected[7]

    asyncio.run(main())


def test_a_start_that_fails_or_is_cancelled_leaves_nothing():
    async def main() -> None:
        with pytest.raises(ConfigError):
            await AsyncLLM.start(**KEYS, max_num_seq=3)
        starting = asyncio.create_task(
            AsyncLLM.start(**KEYS, plugins={"dummy": {"load_seconds": 0.3}})
        )
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())  # waits for what the loop's threads still do
    assert not engine_threads()


def test_a_loop_that_is_gone_does_not_hold_the_engine_up():
    async def begin() -> tuple:
        llm = await AsyncLLM.start(**KEYS)
        stream = llm.generate("a", LONG)
        await anext(stream)
        return llm, stream

    llm, stream = asyncio.run(begin())
    del stream
    gc.collect()

    async def end() -> None:
        await settled(llm)
        await llm.shutdown()

    asyncio.run(end())
    assert not engine_threads()


def test_an_abort_while_a_step_is_taken_in_leaves_nothing_open():
    async def run() -> None:
        llm = await AsyncLLM.start(**KEYS)
        thread, aborted = llm._front.thread, []
        goes_on = thread._goes_on

        def abort(outputs) -> bool:
            if not aborted:
                aborted.append(outputs[0].req_id)
                thread.abort(aborted)
            return goes_on(outputs)

        thread._goes_on = abort
        async for _ in llm.generate("a", LONG):
            pass
        await settled(llm)
        assert aborted
        await llm.shutdown()

    asyncio.run(run())
