"""A worker that meets its driver on one processor goes to another, if there is one to spare."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time

import pytest
from hardpoint.rpc import channel
from hardpoint.rpc.shared_memory import driver_end, parting
from hardpoint.rpc.shared_memory.inline import hot_path, why_not_native
from hardpoint.rpc.shared_memory.layout import FRAME, HEAD, VALUE, WRITER_CPU
from hardpoint.rpc.shared_memory.memory import PAGE, Memory
from hardpoint.rpc.shared_memory.parting import has_room

CAPACITY, FLAGS_AT, TAIL = PAGE, 40, 32
IN_A_ROW = 8
ROUNDS = 30
PAUSE_S = 0.005
PATIENCE = 60.0
"""As in core/native/ring.c."""

several = pytest.mark.skipif(
    bool(why_not_native()) or len(os.sched_getaffinity(0)) < 2,
    reason="there is one processor, or nothing compiled",
)


@pytest.fixture
def processors():
    """Those of this thread, which gets them back."""
    found = os.sched_getaffinity(0)
    yield sorted(found)
    os.sched_setaffinity(0, found)


def says(running):
    """Return what the kernel says where so many run."""
    return f"0.00 0.00 0.00 {running}/300 1\n"


@pytest.fixture
def crowd(tmp_path):
    path = tmp_path / "loadavg"
    path.write_text(says(2))
    return path


class Turns:
    """A reader on this thread and a writer on another, which stays on the first processor and
    writes a frame whenever the reader has taken the last one.
    """

    def __init__(self, processors, crowd, party=2):
        self.all, self.first = set(processors), processors[0]
        self.memory = Memory.create(PAGE + CAPACITY)
        memory, parts = self.memory.map, hot_path()
        self.writer = parts.InlineWriter(memory, PAGE, CAPACITY, FLAGS_AT, 1, 500)
        path = None if crowd is None else str(crowd)
        self.reader = parts.InlineReader(memory, PAGE, CAPACITY, TAIL, lambda: None, path, party)
        self.ended = False
        self.thread = threading.Thread(target=self.write)
        self.thread.start()

    def write(self):
        os.sched_setaffinity(0, {self.first})
        while not self.ended:
            if self.memory.words[HEAD] == self.reader.tail:
                self.writer.edge = self.writer.head + FRAME.size + 8  # it has room: all is read
                self.writer.put(VALUE, 1, 0, 0, b"", bytes(8))
            time.sleep(0)  # the interpreter is the reader's

    def turn(self):
        """Take a frame."""
        assert self.reader.next(PATIENCE) is not None

    def meet(self):
        """Meet the writer IN_A_ROW times. The last time this thread may run anywhere, and is still
        where it was, unless the kernel moved it: then all begins anew.
        """
        deadline = time.monotonic() + PATIENCE
        met = self.reader.met
        while self.reader.met == met or self.reader.in_a_row:
            assert time.monotonic() < deadline
            os.sched_setaffinity(0, {self.first})
            while self.reader.in_a_row < IN_A_ROW - 1:
                self.turn()
            met = self.reader.met
            os.sched_setaffinity(0, self.all)
            self.turn()

    def close(self):
        self.ended = True
        self.thread.join()
        self.writer.release()
        self.reader.release()
        self.memory.close()


def turns(*given):
    return contextlib.closing(Turns(*given))


@several
def test_a_reader_goes_away_from_its_writer_and_may_run_where_it_might_before(processors, crowd):
    number = ctypes.CDLL(None).sched_getcpu
    deadline = time.monotonic() + PATIENCE
    while True:
        with turns(processors, crowd) as both:
            both.meet()
            elsewhere = number() != both.first
            assert both.reader.parted == 1
            assert os.sched_getaffinity(0) == both.all
        if elsewhere:  # unless the kernel has moved it back meanwhile
            return
        assert time.monotonic() < deadline


@several
@pytest.mark.parametrize("party", [2, 4])
@pytest.mark.parametrize("others", [0, 1])
def test_a_reader_stays_where_others_run(processors, crowd, party, others):
    crowd.write_text(says(party + others))
    with turns(processors[:2], crowd, party) as both:
        both.meet()
        assert both.reader.parted == 1 - others


@several
@pytest.mark.parametrize("text", [None, "", "nothing that is known"])
def test_a_reader_stays_if_it_cannot_know_who_runs(processors, crowd, text):
    if text is None:
        crowd.unlink()
    else:
        crowd.write_text(text)
    with turns(processors, crowd) as both:
        both.meet()
        assert both.reader.parted == 0


@several
def test_a_reader_stays_where_there_is_one_processor(processors, crowd):
    with turns(processors[:1], crowd) as both:
        both.meet()
        assert both.reader.met >= IN_A_ROW
        assert both.reader.parted == 0


@several
def test_a_reader_that_is_not_told_to_looks_for_nobody(processors):
    with turns(processors[:1], None) as both:
        os.sched_setaffinity(0, {both.first})
        for _ in range(3 * IN_A_ROW):
            both.turn()
        assert (both.reader.met, both.reader.parted) == (0, 0)


@several
def test_a_reader_that_goes_in_vain_waits_before_it_goes_again(processors, crowd):
    with turns(processors, crowd) as both:
        began = time.monotonic()
        for _ in range(ROUNDS):
            both.meet()
        assert 1 <= both.reader.parted <= 1 + (time.monotonic() - began) / PAUSE_S


@several
def test_a_worker_leaves_its_drivers_processor(processors, crowd, make_group, monkeypatch):
    monkeypatch.setattr(driver_end, "has_room", lambda workers: True)
    group = make_group("shared_memory", 1, start=False)
    group.start_process(0, crowd=crowd)
    os.sched_setaffinity(0, {processors[0]})
    deadline = time.monotonic() + PATIENCE
    parted = 0
    while not parted:
        assert time.monotonic() < deadline
        group.call("confine", processors[:1])
        for number in range(IN_A_ROW // 2):
            assert group.call("echo", number) == [number]
        group.call("confine", processors)
        for number in range(2 * IN_A_ROW):
            assert group.call("echo", number) == [number]
        [(allowed, met, parted)] = group.call("parted")
        assert allowed == tuple(processors)
        assert met >= parted


@pytest.mark.parametrize(("workers", "room"), [(1, True), (3, True), (4, False), (9, False)])
def test_workers_have_room_while_they_are_fewer_than_the_processors(monkeypatch, workers, room):
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {2, 3, 5, 7})
    monkeypatch.setattr(parting, "time_quota", lambda root: None)
    assert has_room(workers) is room
    with contextlib.closing(channel.create("shared_memory", workers)) as end:
        assert end.worker_handle(0).data["apart"] is room


@pytest.mark.parametrize(
    ("lines", "files", "most"),
    [
        ("0::/a/b\n", {"cgroup/a/b/cpu.max": "max 100000", "cgroup/a/cpu.max": "250000 100000"}, 1),
        ("0::/a\n", {"cgroup/cpu.max": "100000 100000", "cgroup/a/cpu.max": "max 100000"}, 0),
        ("0::/../gone\n", {"cgroup/cpu.max": "300000 100000"}, 2),
        ("0::/a\n", {"cgroup/a/cpu.max": "max 100000"}, 7),
        ("0::/a\n", {"cgroup/a/cpu.max": "what is this"}, 7),
        ("0::/a\n", {}, 7),
        (
            "4:cpu,cpuacct:/a\n2:memory:/a\n0::/a\n",
            {
                "cgroup/cpu/a/cpu.cfs_quota_us": "200000",
                "cgroup/cpu/a/cpu.cfs_period_us": "100000",
                "cgroup/cpu/cpu.cfs_quota_us": "-1",
                "cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (None, {"cgroup/cpu.max": "100000 100000"}, 7),
    ],
)
def test_a_quota_leaves_room_for_fewer_workers(monkeypatch, tmp_path, lines, files, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(8)))
    told = {f"sys/fs/{name}": text for name, text in files.items()}
    told["proc/self/mountinfo"] = (
        "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        "31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    if lines is not None:
        told["proc/self/cgroup"] = lines
    for name, text in told.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rooms = [has_room(workers, tmp_path) for workers in range(1, 10)]
    assert rooms == [workers <= most for workers in range(1, 10)]


def test_what_python_writes_says_of_no_processor(make_group):
    group = make_group("shared_memory", 1, near=True)
    words = group.end._memories[0].words
    group.call("echo", 1)
    assert why_not_native() or words[WRITER_CPU] > 0
    group.call("size", bytearray(1 << 20))
    assert words[WRITER_CPU] == 0
