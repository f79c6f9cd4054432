"""The parts of ``mp`` that need no process: names, cores, ways, output, messages, the loop."""

from __future__ import annotations

import os
import socket
import threading
import time
from itertools import pairwise

import pytest
from attrs import evolve
from hardpoint.config import Config
from hardpoint.config.schema import ParallelConfig
from hardpoint.records import ForkSafety
from hardpoint_multiproc import descriptors
from hardpoint_multiproc.affinity import shares_of
from hardpoint_multiproc.loading_watch import LEAST_SHARE, LoadingWatch
from hardpoint_multiproc.loop import LONGEST_WAIT, Loop, left_until
from hardpoint_multiproc.output import KEPT_LINES, LONGEST_LINE, Output
from hardpoint_multiproc.start_choice import NURSERY, PLAIN, choose, read_early
from hardpoint_multiproc.titles import title_of

PATIENCE = 60.0

# Names.


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "titles"),
    [
        (1, 1, 1, ["Worker"]),
        (3, 1, 1, ["Worker_TP0", "Worker_TP1", "Worker_TP2"]),
        (1, 2, 1, ["Worker_PP0", "Worker_PP1"]),
        (2, 2, 1, ["Worker_PP0_TP0", "Worker_PP0_TP1", "Worker_PP1_TP0", "Worker_PP1_TP1"]),
        (1, 1, 2, ["Worker_DP0", "Worker_DP1"]),
        (2, 1, 2, ["Worker_DP0_TP0", "Worker_DP0_TP1", "Worker_DP1_TP0", "Worker_DP1_TP1"]),
    ],
)
def test_a_worker_is_named_by_its_place(tp, pp, dp, titles):
    parallel = ParallelConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp
    )
    config = evolve(Config(), parallel=parallel)
    assert [title_of(config, rank, len(titles)) for rank in range(len(titles))] == titles


def test_more_workers_than_the_sizes_say_are_numbered():
    assert [title_of(Config(), rank, 3) for rank in range(3)] == [
        "Worker_0",
        "Worker_1",
        "Worker_2",
    ]


# Steps in flight.


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_as_many_steps_fly_as_there_are_stages_and_one_more_if_planned_ahead(
    launcher, stages, ahead
):
    keys = {"pipeline_parallel_size": stages, "async_scheduling": ahead}
    executor = launcher.built(workers=None, **keys)
    assert executor.supports_pp
    assert executor.max_concurrent_batches == stages + ahead


# Cores.


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ((0, 1), 1, ((0, 1),)),
        ((0, 1), 2, ((0,), (1,))),
        ((0, 1, 2, 5, 7), 2, ((0, 1), (2, 5, 7))),
        ((3, 4), 3, ((3, 4), (3, 4), (3, 4))),
    ],
)
def test_shares_are_disjoint_where_there_are_enough(cores, workers, shares):
    assert shares_of(cores, workers) == shares


# The way of the start.

SAFE = ForkSafety(safe=True, reason="")


def test_the_way_that_is_named_is_taken():
    assert choose(PLAIN, SAFE, {}).kind == PLAIN
    assert choose(NURSERY, SAFE, {"X": "1"}).kind == NURSERY
    assert choose("auto", SAFE, {"X": "1"}).kind == NURSERY


@pytest.mark.parametrize(
    ("safety", "variables", "reason"),
    [
        (ForkSafety(safe=False, reason="it was begun"), {}, "it was begun"),
        (SAFE, {"LD_LIBRARY_PATH": "x", "OK": "y"}, "need LD_LIBRARY_PATH set"),
    ],
)
def test_an_obstacle_is_a_reason_or_an_error(safety, variables, reason):
    way = choose("auto", safety, variables)
    assert (way.kind, reason in way.reason) == (PLAIN, True)
    with pytest.raises(ValueError, match=reason):
        choose(NURSERY, safety, variables)
    assert choose(PLAIN, safety, variables).reason == "as configured"


@pytest.mark.parametrize(
    ("name", "early"),
    [
        ("LD_PRELOAD", True),
        ("ANY_VISIBLE_DEVICES", True),
        ("MALLOC_CONF", True),
        ("PYTORCH_ALLOC_CONF", True),
        ("PYTORCH_SOME_ALLOC_CONF", True),
        ("OMP_NUM_THREADS", True),
        ("PYTHONHASHSEED", True),
        ("HF_HOME", False),
        ("VISIBLE", False),
        ("TOKENIZERS_PARALLELISM", False),
    ],
)
def test_which_variables_are_read_early(name, early):
    assert bool(read_early({name: ""})) == early


# Output.


@pytest.fixture
def output():
    made = Output()
    yield made
    made.close(PATIENCE)
    made.close(PATIENCE)


def written(output, data, key=0, label="w"):
    fd = output.add(key, label)
    os.write(fd, data)
    os.close(fd)


def test_the_last_lines_are_all_that_was_written_though_nobody_has_read_it(output, capfd):
    written(output, b"one\ntwo\nthree")
    assert output.last_lines(0) == ("one", "two", "three")
    assert output.last_lines(9) == ()
    assert "(w) one\n(w) two\n" in capfd.readouterr().err


def test_only_so_many_lines_are_kept(output):
    written(output, b"".join(b"%d\n" % number for number in range(100)))
    assert output.last_lines(0) == tuple(map(str, range(100 - KEPT_LINES, 100)))


def test_a_line_without_an_end_is_broken(output):
    written(output, b"x" * (3 * LONGEST_LINE) + b"\xff\n")  # with its end at hand, too
    written(output, b"x" * (3 * LONGEST_LINE) + b"\xff", key=1)
    assert output.last_lines(1) == output.last_lines(0)
    lines = output.last_lines(0)
    assert [len(line) for line in lines] == [LONGEST_LINE] * 3 + [1]


def test_lines_are_shown_as_they_come_and_at_the_end(capfd, eventually):
    output = Output()
    output.start()
    fd = output.add(0, "before")
    output.rename(0, "after")
    os.write(fd, b"line\nrest")
    shown = []

    def seen():
        shown.append(capfd.readouterr().err)
        return "(after) line\n" in "".join(shown)

    eventually(seen)
    output.close(PATIENCE)
    assert capfd.readouterr().err == "(after) rest\n"
    os.close(fd)


def test_an_output_that_nobody_can_see_harms_nobody(monkeypatch):
    for stream in (None, open(os.devnull, "w")):  # noqa: PTH123, SIM115
        if stream is not None:
            stream.close()
        monkeypatch.setattr("sys.stderr", stream)
        output = Output()
        output.start()
        written(output, b"line\n")
        assert output.last_lines(0) in (("line",), ())
        output.close(PATIENCE)


# Messages with descriptors.


def test_descriptors_travel_and_are_not_inherited():
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, second = descriptors.memory("a", b"x" * 100_000), descriptors.memory("b")
    descriptors.send(one, {"op": "start"}, [first, second])
    message, fds = descriptors.receive(two)
    assert message == {"op": "start"}
    assert [descriptors.contents(fd) for fd in fds] == [b"x" * 100_000, b""]
    assert not any(map(os.get_inheritable, fds))
    descriptors.close([first, second, *fds])
    descriptors.close([first])
    one.close()
    assert descriptors.receive(two) is None
    two.close()


# The loop.


@pytest.fixture
def loop():
    made = Loop("test", lambda: None)
    made.start()
    yield made
    made.end(PATIENCE)
    made.end(PATIENCE)
    assert not made._thread.is_alive()


def test_what_is_called_runs_on_the_loops_thread_in_order(loop):
    ran, done = [], threading.Event()
    for number in range(100):
        loop.call(lambda number=number: ran.append((number, loop.is_current())))
    loop.call(done.set)
    assert done.wait(PATIENCE)
    assert ran == [(number, True) for number in range(100)]
    assert not loop.is_current()


def test_what_raises_does_not_end_the_loop(loop, caplog):
    done = threading.Event()
    loop.call(lambda: 1 / 0)
    loop.call(done.set)
    assert done.wait(PATIENCE)
    assert "ZeroDivisionError" in caplog.text


def test_descriptors_are_watched_until_they_are_forgotten(loop):
    read, write = os.pipe()
    heard, done = [], threading.Event()

    def handle():
        heard.append(os.read(read, 1))
        if heard[-1] == b"b":
            loop.forget(read)
            done.set()

    loop.call(lambda: loop.watch(read, handle))
    os.write(write, b"a")
    os.write(write, b"b")
    assert done.wait(PATIENCE)
    os.write(write, b"c")
    after = threading.Event()
    loop.call(after.set)
    assert after.wait(PATIENCE)
    assert heard == [b"a", b"b"]
    os.close(read)
    os.close(write)


def test_ticks_come_when_they_are_due_even_if_one_raises(loop):
    ticks, enough = [], threading.Event()

    def tick(now):
        ticks.append(now)
        if len(ticks) == 5:
            enough.set()
        return now + 0.01

    loop.ask(tick)
    loop.call(lambda: None)
    assert enough.wait(PATIENCE)
    assert all(later - sooner >= 0.009 for sooner, later in pairwise(ticks[1:]))


def test_a_loop_that_never_started_can_be_ended():
    loop = Loop("test", lambda: None)
    loop.call(lambda: None)
    loop.end(1)


def test_a_wait_is_never_longer_than_a_clock_takes():
    assert left_until(float("inf")) == LONGEST_WAIT
    assert left_until(0.0) == 0.0
    assert 0 < left_until(time.monotonic() + 5) <= 5


# Progress of loading.


def test_a_start_is_stuck_when_no_worker_comes_further():
    watch = LoadingWatch(10.0)
    assert watch.stuck(1e6) == {}
    watch.heard(0, "load_model", 1.0, 100.0)
    watch.heard(1, "load_model", 1.0, 101.0)
    assert watch.stuck(110.9) == {}
    assert watch.stuck(111.0) == {0: "load_model", 1: "load_model"}
    assert watch.since(111.0) == 10.0
    watch.heard(0, "load_model", 1.0 + LEAST_SHARE * 5, 111.0)  # in eleven seconds
    assert watch.stuck(111.0)
    watch.heard(0, "load_model", 1.0 + LEAST_SHARE * 6, 112.0)
    assert watch.stuck(121.0) == {}
    watch.heard(0, "", 2.0, 121.0)
    assert watch.stuck(130.0) == {}
    assert watch.stuck(131.0) == {1: "load_model"}
    watch.heard(1, "", 2.0, 131.0)
    assert watch.stuck(1e6) == {}


def test_other_calls_may_take_as_long_as_they_like():
    watch = LoadingWatch(10.0)
    watch.heard(0, "execute_model", 1.0, 100.0)
    assert watch.stuck(1e6) == {}
