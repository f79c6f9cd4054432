"""The control lane: beats, pings, orders, its end, and messages that are none (S1)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hardpoint.records import WorkerHealth
from hardpoint.rpc.control import (
    LONGEST_TEXT,
    ControlLane,
    ControlThread,
    Order,
    Report,
    Sign,
    lane,
)

PATIENCE = 60.0


class Pair:
    def __init__(self, interval=60.0):
        ours, self.theirs = lane()
        self.lane = ControlLane(ours)
        self.orphaned = threading.Event()
        self.thread = ControlThread(self.theirs, interval, orphaned=self.orphaned.set)

    def next(self, sign):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            reports, _ = self.lane.reports()
            for report in reports:
                if report.sign is sign:
                    return report
            time.sleep(0.001)
        raise TimeoutError(sign)

    def close(self):
        self.lane.close()
        if self.thread._thread.ident:
            assert self.orphaned.wait(PATIENCE)
            self.thread._thread.join(PATIENCE)
        self.theirs.close()


@pytest.fixture
def pair():
    made = Pair()
    made.thread.start()
    yield made
    made.close()


def test_a_report_survives_its_journey():
    for report in (
        Report(sign=Sign.HEARTBEAT),
        Report(sign=Sign.PONG, number=7, step_id=12, busy_since=1.5, work=0.25, text="exécute"),
        Report(sign=Sign.STAGE, text="plugins"),
    ):
        assert Report.unpack(report.pack()) == report
    long = Report(sign=Sign.STAGE, text="é" * LONGEST_TEXT)
    assert Report.unpack(long.pack()).text.startswith("é" * (LONGEST_TEXT // 2 - 1))


@pytest.mark.parametrize(
    "data", [b"", b"x", bytes(200), b"\xff" * len(Report(sign=Sign.PONG).pack())]
)
def test_what_is_no_report_is_none(data):
    assert Report.unpack(data) is None


def test_a_ping_is_answered_with_the_loops_own_words(pair):
    since = time.monotonic()
    health = WorkerHealth(rank=0, step_id=5, busy_since=since)
    pair.thread.watch(lambda: health, lambda: "execute_model")
    assert pair.lane.order(Order.PING, 41)
    pong = pair.next(Sign.PONG)
    assert (pong.number, pong.step_id, pong.busy_since) == (41, 5, since)
    assert pong.text == "execute_model"
    health = WorkerHealth(rank=0, step_id=6, busy_since=None)
    pair.lane.order(Order.PING, 42)
    pong = pair.next(Sign.PONG)
    assert (pong.number, pong.busy_since, pong.text) == (42, None, "")


def test_beats_come_by_themselves_and_tell_of_work():
    pair = Pair(interval=0.01)
    pair.thread.start()
    first = pair.next(Sign.HEARTBEAT)
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    pair.lane.reports()
    later = pair.next(Sign.HEARTBEAT)
    assert later.work >= first.work + 0.05
    pair.close()


def test_stages_are_told_until_the_loop_is_watched(pair):
    pair.thread.stage("plugins")
    assert pair.next(Sign.STAGE).text == "plugins"
    pair.lane.order(Order.PING, 1)
    assert pair.next(Sign.PONG).text == "plugins"


def test_orders_are_obeyed_whatever_the_loop_does(pair):
    ended = threading.Event()
    pair.thread.on_end_collectives(ended.set)
    assert not pair.thread.cancelled()
    pair.lane.order(Order.END_COLLECTIVES)
    assert ended.wait(PATIENCE)
    assert not pair.thread.cancelled()
    pair.lane.order(Order.CANCEL)
    pair.lane.order(Order.PING, 1)
    pair.next(Sign.PONG)
    assert pair.thread.cancelled()


def test_an_end_that_was_ordered_before_somebody_listened_is_not_lost(pair):
    pair.lane.order(Order.END_COLLECTIVES)
    pair.lane.order(Order.PING, 1)
    pair.next(Sign.PONG)
    ended = threading.Event()
    pair.thread.on_end_collectives(ended.set)
    assert ended.wait(0)


def test_an_end_that_raises_does_not_silence_the_lane(pair, caplog):
    pair.thread.on_end_collectives(lambda: 1 / 0)
    pair.lane.order(Order.END_COLLECTIVES)
    pair.lane.order(Order.PING, 3)
    assert pair.next(Sign.PONG).number == 3
    assert "ending the collectives raised" in caplog.text


UNKNOWN = b"\xff" + os.urandom(112)
"""As large as a report, and of no kind."""


@pytest.mark.parametrize(
    "data",
    [b"x", bytes(9), b"\xff" * 9, os.urandom(100), b"\x80\x05cos\nsystem\n."],
    ids=["short", "zeros", "ones", "random", "pickle"],
)
def test_hostile_messages_to_a_worker_have_no_effect(pair, data):
    pair.lane._end.send(data)
    pair.lane.order(Order.PING, 9)
    assert pair.next(Sign.PONG).number == 9
    assert not pair.thread.cancelled()


@pytest.mark.parametrize(
    "data",
    [b"x", bytes(500), UNKNOWN, b"\x80\x05cos\nsystem\n."],
    ids=["short", "long", "random", "pickle"],
)
def test_hostile_messages_to_the_driver_have_no_effect(pair, data):
    pair.theirs.send(data)
    pair.lane.order(Order.PING, 9)
    reports = [pair.next(Sign.PONG)]
    assert [report.number for report in reports] == [9]


def test_a_full_lane_blocks_nobody():
    pair = Pair()  # its thread is not started, as of a worker that is stopped
    began = time.monotonic()
    sent = sum(pair.lane.order(Order.PING, number) for number in range(100_000))
    assert 0 < sent < 100_000
    for _ in range(100_000):
        pair.thread.stage("x")
    assert time.monotonic() - began < PATIENCE
    pair.close()


def test_the_end_of_the_lane_is_told_once_to_each_side(pair):
    pair.lane.close()
    assert pair.orphaned.wait(PATIENCE)
    assert not pair.lane.order(Order.PING)
    assert pair.lane.fileno() == -1
    other = Pair()
    other.theirs.close()
    assert other.lane.reports() == ([], False)
    other.lane.close()


ORPHAN = """
import socket, subprocess, sys, time, os
from hardpoint.rpc.control import ControlThread
os.setpgid(0, 0)
child = subprocess.Popen(["sleep", "1000"])
ControlThread(socket.socket(fileno=int(sys.argv[1])), 1.0).start()
print(child.pid, flush=True)
while True:
    time.sleep(100)
"""


def test_a_worker_whose_driver_is_gone_ends_with_all_that_it_started():
    ours, theirs = lane()
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        theirs.close()
        child = int(process.stdout.readline())
        ours.close()
        assert process.wait(PATIENCE) == -signal.SIGKILL
        end = time.monotonic() + PATIENCE
        while _state(child) not in ("", "Z"):
            assert time.monotonic() < end
            time.sleep(0.005)


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_lane_is_a_pair_of_sockets_that_nobody_else_can_reach():
    ours, theirs = lane()
    for end in (ours, theirs):
        assert end.getsockname() in ("", b"")
        assert end.family == socket.AF_UNIX
        assert not os.get_inheritable(end.fileno())
        end.close()
