"""The trace of a run: one that Perfetto opens, with every step, phase, request and worker in it."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from hardpoint.errors import CallTimeoutError, InvalidRequestError
from hardpoint_engine import LLM, SamplingParams
from hardpoint_engine.cli.tracing import tracing
from hardpoint_engine.timeline import extension, timeline, trace_file
from hardpoint_engine.timeline.timeline import DRIVER, FIRST_RANK, REQUESTS, Timeline

HARDPOINT = str(Path(sys.executable).with_name("hardpoint"))
KEYS = {"platform": "dummy", "load_format": "dummy", "max_model_len": 256}
SHORT = SamplingParams(temperature=0, max_tokens=5)


def read(path: Path) -> tuple[dict, dict]:
    """Return the names of processes, and the spans by process and thread; check all of them."""
    events = json.loads(path.read_text())["traceEvents"]
    names, threads = {}, set()
    spans = defaultdict(lambda: defaultdict(list))
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            else:
                assert event["name"] == "thread_name"
                threads.add((event["pid"], event["tid"]))
            continue
        if event["ph"] == "i":
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        spans[event["pid"]][event["tid"]].append(event)
    for pid, lanes in spans.items():
        assert pid in names
        for tid, lane in lanes.items():
            assert (pid, tid) in threads
            check_nested(lane)
    return names, spans


def check_nested(lane: list[dict]) -> None:
    """Spans of one thread lie within each other, or apart."""
    open_ends: list[float] = []
    for event in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= begin + 0.2:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 0.2, event
        open_ends.append(end)


def all_of(lanes: dict) -> list[dict]:
    return [event for lane in lanes.values() for event in lane]


def children(parent: dict, lanes: dict) -> list[str]:
    """The names of what lies within a span, in order."""
    begin, end = parent["ts"] - 0.2, parent["ts"] + parent["dur"] + 0.2
    inner = [
        event
        for event in lanes[parent["tid"]]
        if event is not parent and begin <= event["ts"] and event["ts"] + event["dur"] <= end
    ]
    return [event["name"] for event in sorted(inner, key=lambda each: each["ts"])]


@pytest.mark.parametrize(
    ("executor", "parallel"),
    [("uni", {}), ("mp", {"tensor_parallel_size": 2}), ("mp", {"pipeline_parallel_size": 2})],
)
def test_every_step_phase_request_and_worker_is_in_it(tmp_path, executor, parallel):
    path = tmp_path / "trace.json"
    with (
        tracing(str(path)) as watch,
        LLM(**KEYS, executor=executor, **parallel) as llm,
        watch(llm.core),
    ):
        results = llm.generate(
            ["one", "two", "three"], [SHORT, SHORT, SamplingParams(max_tokens=2)]
        )
        world, steps = llm.executor.world_size, llm.metrics.steps
    names, spans = read(path)
    assert names == {
        DRIVER: "driver", REQUESTS: "requests",
        **{FIRST_RANK + rank: f"rank {rank}" for rank in range(world)},
    }  # fmt: skip
    driver = {e["name"]: e for e in all_of(spans[DRIVER]) if e["name"].startswith("step ")}
    assert len(driver) == steps
    for step in driver.values():
        assert children(step, spans[DRIVER]) == ["schedule", "execute", "update"]
        assert not step["args"]["failed"]
        assert sum(step["args"]["requests"].values()) == step["args"]["tokens"]
    for rank in range(world):
        seen = {e["name"]: e for e in all_of(spans[FIRST_RANK + rank])}
        assert {name for name in seen if name.startswith("step ")} == set(driver)
        for name, step in driver.items():  # one clock for all processes
            assert step["ts"] <= seen[name]["ts"]
            assert seen[name]["ts"] <= step["ts"] + step["dur"]
    lives = {e["name"]: e for e in all_of(spans[REQUESTS]) if e["name"].startswith("request ")}
    assert len(lives) == 3
    for result in results:
        life = lives[f"request {result.request_id}"]
        assert children(life, spans[REQUESTS]) == ["queued", "prefill", "decode"]
        assert life["args"]["finish_reason"] == "length"
        assert life["args"]["output_tokens"] == len(result.outputs[0].token_ids)


def test_a_failed_step_and_an_aborted_request_are_in_it(tmp_path):
    path = tmp_path / "trace.json"
    keys = {**KEYS, "plugins": {"dummy": {"fail_at": "step:3"}}}
    with tracing(str(path)) as watch, LLM(**keys) as llm, watch(llm.core):
        with llm.stream("one", SHORT) as stream:
            next(stream)
        with pytest.raises(Exception, match="step"):
            llm.generate("two", SHORT)
        llm.generate("three", SHORT)
    _, spans = read(path)
    reasons = [e["args"].get("finish_reason") for e in all_of(spans[REQUESTS])]
    assert sorted(filter(None, reasons)) == ["abort", "error", "length"]
    failed = [e for e in all_of(spans[DRIVER]) if e["args"].get("failed")]
    assert len(failed) == 1


def test_phases_of_a_worker_lie_within_its_step(tmp_path):
    """As platforms that time their phases report them; clocks that differ cross no span."""

    class Core:
        executor = None

        def collective_rpc(self, method, args, timeout):
            return [(0, [(1, 1.0, 2.0, (0.25, 0.5, 0.5)), (2, 1.5, 3.0, None)]), (0, [])]

    core = Core()
    core.executor = core
    timeline = Timeline(str(tmp_path / "trace.json"))
    timeline.collect(core)
    timeline.close()
    names, spans = read(tmp_path / "trace.json")
    assert {names[FIRST_RANK], names[FIRST_RANK + 1]} == {"rank 0", "rank 1"}
    first, second = spans[FIRST_RANK][0], spans[FIRST_RANK][1]
    assert children(first[0], {0: first}) == ["prepare", "forward", "sample"]
    assert [event["name"] for event in second] == ["step 2"]


def missing(path: Path) -> list[tuple[int, str]]:
    """What a trace says that it lacks, with the processes."""
    events = json.loads(path.read_text())["traceEvents"]
    return [(event["pid"], event["name"]) for event in events if event["ph"] == "i"]


def test_a_long_run_s_trace_says_what_it_lacks(tmp_path, monkeypatch, caplog):
    path = tmp_path / "trace.json"
    monkeypatch.setattr(extension, "MOST", 3)
    with tracing(str(path)) as watch, LLM(**KEYS) as llm, watch(llm.core):
        llm.generate("one", SHORT)
    _, spans = read(path)
    seen = [e["name"] for e in all_of(spans[FIRST_RANK]) if e["name"].startswith("step ")]
    assert seen == ["step 3", "step 4", "step 5"]
    assert missing(path) == [(FIRST_RANK, "the first 2 steps of rank 0 are missing")]
    (record,) = [record for record in caplog.records if "incomplete" in record.message]
    assert record.levelno == logging.WARNING
    assert record.message.endswith("the first 2 steps of rank 0 are missing")


def test_spans_come_in_portions(tmp_path, monkeypatch):
    path, sizes = tmp_path / "trace.json", []
    take = extension.take_spans

    def counted(worker, most):
        dropped, spans = take(worker, most)
        sizes.append(len(spans))
        return dropped, spans

    monkeypatch.setattr(extension, "take_spans", counted)
    monkeypatch.setattr(timeline, "PORTION", 2)
    with tracing(str(path)) as watch, LLM(**KEYS) as llm, watch(llm.core):
        llm.generate("one", SHORT)
    assert sizes == [2, 2, 1]
    _, spans = read(path)
    assert len([e for e in all_of(spans[FIRST_RANK]) if e["name"].startswith("step ")]) == 5
    assert missing(path) == []


def test_workers_that_do_not_answer_are_said_to_be_missing(tmp_path, caplog):
    class Core:
        executor = None

        def collective_rpc(self, method, args, timeout):
            raise CallTimeoutError("nobody answered")

    core = Core()
    core.executor = core
    path = tmp_path / "trace.json"
    picture = Timeline(str(path))
    picture.collect(core)
    picture.close()
    ((process, what),) = missing(path)
    assert process == DRIVER
    assert "CallTimeoutError: nobody answered" in what
    assert what in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("steps", [2, 100], ids=["found at the end", "found in a step"])
def test_a_full_disk_ends_the_trace_and_nothing_else(caplog, steps):
    params = SamplingParams(temperature=0, max_tokens=steps)
    with LLM(**KEYS) as llm:
        expected = llm.generate("one", params)[0].outputs[0].token_ids
    with tracing("/dev/full") as watch, LLM(**KEYS) as llm, watch(llm.core):
        for _ in range(2):
            assert llm.generate("one", params)[0].outputs[0].token_ids == expected
        assert llm.metrics.finished == {"length": 2}
    (record,) = [record for record in caplog.records if "/dev/full" in record.message]
    assert record.levelno == logging.ERROR
    assert "No space left" in record.message


def test_the_file_is_whole_at_every_moment(tmp_path, monkeypatch):
    """Also where a disk is full in the middle of a write."""
    path = tmp_path / "trace.json"
    pwrite, written = os.pwrite, []

    def seen(handle, data, at):
        done = pwrite(handle, data, at)
        written.append(json.loads(path.read_text())["traceEvents"])
        return done

    monkeypatch.setattr(os, "pwrite", seen)
    monkeypatch.setattr(trace_file, "MOST_SECONDS", 0)
    with tracing(str(path)) as watch, LLM(**KEYS) as llm, watch(llm.core):
        llm.generate("one", SHORT)
    assert len(written) > 20
    assert [len(events) for events in written] == sorted(len(events) for events in written)

    file = trace_file.TraceFile(str(path))
    file.add({"name": "first"})

    def full(handle, data, at):
        if len(data) > 200:
            pwrite(handle, data[:100], at)
            raise OSError(errno.ENOSPC, "full")
        return pwrite(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        file.add({"name": "x" * 300})
    assert json.loads(path.read_text())["traceEvents"] == [{"name": "first"}]


def test_a_pipe_gets_a_whole_document(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(path.read_text)
        with tracing(str(path)) as watch, LLM(**KEYS) as llm, watch(llm.core):
            llm.generate("one", SHORT)
        assert len(json.loads(reading.result(30))["traceEvents"]) > 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_a_trace_that_can_be_opened(tmp_path, number):
    path = tmp_path / "trace.json"
    arguments = [
        HARDPOINT, "generate", "--platform", "dummy", "--load-format", "dummy", "--raw", "--set",
        "plugins.dummy.step_seconds=0.05", "--max-tokens", "2000", "--max-model-len", "4096",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*arguments, "one", "--trace", str(path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or b'"step 5"' not in path.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    names, spans = read(path)
    assert set(names.values()) == {"driver", "requests"}
    assert len(all_of(spans[DRIVER])) >= 4 * 4
    if number == signal.SIGINT:
        assert missing(path) == [
            (DRIVER, "steps of the workers are missing: the run was interrupted")
        ]


def test_a_trace_has_nothing_of_an_earlier_run_that_was_interrupted(tmp_path):
    """Both had their worker in this process, and nobody fetched the first one's steps."""
    counts = []
    for end in (KeyboardInterrupt, None):
        path = tmp_path / f"{end}.json"
        with (
            pytest.raises(end) if end else nullcontext(),
            tracing(str(path)) as watch,
            LLM(**KEYS, executor="uni") as llm,
            watch(llm.core),
        ):
            llm.generate(["one"], SHORT)
            if end:
                raise end
        counts.append(llm.metrics.steps)
    steps = [event["name"] for event in all_of(read(path)[1][FIRST_RANK])]
    assert len([name for name in steps if name.startswith("step ")]) == counts[1]


def test_nobody_listens_when_no_trace_is_asked_for(tmp_path):
    with tracing(None) as watch, LLM(**KEYS) as llm, watch(llm.core):
        assert llm.core.registry.implementers("hardpoint_step_started") == ()
    with tracing(str(tmp_path / "trace.json")):
        pass
    with LLM(**KEYS) as llm:
        assert llm.core.registry.implementers("hardpoint_step_started") == ()
    assert json.loads((tmp_path / "trace.json").read_text())
    with (
        pytest.raises(InvalidRequestError, match="cannot be written"),
        tracing(str(tmp_path / "none" / "trace.json")),
    ):
        pass


def test_the_command_writes_one(tmp_path):
    path = tmp_path / "trace.json"
    arguments = [HARDPOINT, "generate", "--platform", "dummy", "--load-format", "dummy", "--raw"]
    done = subprocess.run(
        [*arguments, "--max-tokens", "3", "one", "--trace", str(path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, _ = read(path)
    assert set(names.values()) == {"driver", "requests", "rank 0"}
