"""Deadlines of calls that nobody waits for: one thread, which ends."""

from __future__ import annotations

import threading
import time

from hardpoint.rpc.deadlines import Deadlines


class Expired:
    def __init__(self):
        self.ids = []
        self.changed = threading.Condition()

    def __call__(self, call_id):
        with self.changed:
            self.ids.append(call_id)
            self.changed.notify_all()

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ids) >= count, timeout=20)


def test_calls_expire_in_order_of_their_deadlines():
    expired = Expired()
    deadlines = Deadlines(expired)
    now = time.monotonic()
    deadlines.add(now + 0.05, 3)
    deadlines.add(now + 0.01, 1)
    deadlines.add(now + 0.03, 2)
    deadlines.add(now - 1, 0)
    expired.wait_for(4)
    assert expired.ids == [0, 1, 2, 3]


def test_one_thread_serves_all_and_ends_when_none_is_left():
    expired = Expired()
    deadlines = Deadlines(expired)
    for number in range(100):
        deadlines.add(time.monotonic() + 0.02, number)
    thread = deadlines._thread
    assert [t.name for t in threading.enumerate()].count("hardpoint-deadlines") >= 1
    expired.wait_for(100)
    thread.join(60)
    assert not thread.is_alive()
    deadlines.add(time.monotonic(), 100)
    expired.wait_for(101)


def test_closing_forgets_deadlines_and_ends_the_thread():
    expired = Expired()
    deadlines = Deadlines(expired)
    deadlines.add(time.monotonic() + 3600, 1)
    thread = deadlines._thread
    deadlines.close()
    deadlines.close()
    thread.join(60)
    assert not thread.is_alive()
    deadlines.add(time.monotonic(), 2)
    assert expired.ids == []
    assert deadlines._thread is None
