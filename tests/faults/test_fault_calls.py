"""Random calls to real workers, with timeouts, errors, losses and doubles among them: every answer
belongs to its call, and every call ends once (rows R1c, R6; V3, V4).

What the simulator does at any scale (core/tests/rpc) is done here over either channel, by fault
points. A rule that injects a fault sees that it fired. Hypothesis tells how to replay its choices.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest
from attrs import define, field
from fault_groups import PATIENCE, SIZE, SLACK, settle
from hardpoint.errors import CallTimeoutError, ExecutorFailedError, RemoteError, WorkerDiedError
from hardpoint.rpc.faults import fault, fired
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

RANKS = st.integers(0, SIZE - 1)
TIMEOUTS = st.sampled_from([None, 0.0, 0.004, 10.0])
SOON = 0.02
"""Seconds that a call may take whose answer is lost."""


def answer(worker, number, seconds=0.0, raising=()):
    time.sleep(seconds)
    if worker.rank in raising:
        raise ValueError(number, worker.rank)
    return number, worker.rank


def plan_in_worker(worker, text):
    from hardpoint.rpc import faults  # the worker's own: this function travels by value

    faults.fault.plan(text)


@define(eq=False)
class Asked:
    """A call as the model knows it."""

    number: int
    reply_rank: int | None = None
    timeout: float | None = None
    raising: tuple[int, ...] = ()
    ends: list[str | None] = field(factory=list)
    """What was wrong with each of its ends."""

    def end(self, future):
        if future.cancelled():
            self.ends.append(None)
        else:
            error = future.exception(0)
            self.ends.append(self.wrong_with(None if error else future.result(0), error))

    def wrong_with(self, value, error):
        """Return what is wrong with such an end of it, or None."""
        if error is None:
            everything = [(self.number, rank) for rank in range(SIZE)]
            wanted = everything if self.reply_rank is None else everything[self.reply_rank]
            return None if value == wanted and not self.raising else f"it got {value}"
        if isinstance(error, CallTimeoutError):
            return None if self.timeout is not None else "it timed out without a timeout"
        if isinstance(error, RemoteError):
            own = getattr(error.__cause__, "args", None) == (self.number, error.rank)
            return None if own and error.rank in self.raising else f"it got {error!r}"
        return None if isinstance(error, ExecutorFailedError) else f"it got {error!r}"


class Lab:
    """The group that is called, kept for as long as it lives, and what was seen in all."""

    def __init__(self, groups, folder, channel):
        self.groups = groups
        self.folder = folder
        self.channel = channel
        self.numbers = itertools.count()
        self.group = None
        self.seen = Counter()

    def start(self):
        if self.group is None:
            self.group = self.groups.ready(**{"plugins.mp.channel": self.channel})
            self.pids = self.group.collective_rpc(pid_of)
        return self.group

    def end(self):
        self.seen["late"] += self.group.calls.late_replies
        self.group.shutdown()
        self.group = None

    def fired(self, point):
        return fired(self.folder, point)


def pid_of(worker):
    return os.getpid()


class Machine(RuleBasedStateMachine):
    """Calls to one group, against what may become of each."""

    def __init__(self, lab):
        super().__init__()
        self.lab = lab
        self.group = lab.start()
        self.asked = []
        self.futures = []
        self.killed = None

    @initialize(last=st.sampled_from(["nothing", "nothing", "kill", "shutdown"]))
    def begin(self, last):
        self.last = last

    def ask(self, *, seconds=0.0, non_block=False, **how):
        call = Asked(number=next(self.lab.numbers), **how)
        self.asked.append(call)
        self.lab.seen["calls"] += 1
        options = {
            "args": (call.number, seconds, call.raising),
            "timeout": call.timeout,
            "reply_rank": call.reply_rank,
        }
        if non_block:
            future = self.group.collective_rpc(answer, non_block=True, **options)
            self.futures.append(future)
            future.add_done_callback(call.end)
            return call
        value = error = None
        if call.timeout is None:
            options["timeout"] = PATIENCE  # so that what never ends is seen to
        try:
            value = self.group.collective_rpc(answer, **options)
        except Exception as raised:
            error = raised
        call.ends.append(call.wrong_with(value, error))
        self.lab.seen[type(error).__name__] += 1
        return call

    # What is done.

    @rule(
        timeout=TIMEOUTS,
        reply_rank=st.none() | RANKS,
        raising=st.sampled_from([(), (), (1,), (0, 2), (0, 1, 2)]),
        seconds=st.sampled_from([0.0, 0.0, 0.01]),
        non_block=st.booleans(),
    )
    def call(self, **how):
        self.ask(**how)

    @rule(timeout=st.sampled_from([0.0, 0.002]))
    def retry_while_the_first_still_runs(self, timeout):
        self.ask(seconds=0.01, timeout=timeout)
        self.ask(timeout=None)

    @rule(count=st.integers(2, 12))
    def many_and_some_taken_back(self, count):
        self.ask(seconds=0.005, non_block=True)
        for number in range(count):
            self.ask(non_block=True, reply_rank=number % SIZE)
            if number % 3 == 0 and self.futures[-1].cancel():
                self.lab.seen["cancelled"] += 1

    @rule(timeout=st.sampled_from([None, 0.002]))
    def from_several_threads(self, timeout):
        threads = [
            threading.Thread(target=partial(self.ask, timeout=timeout, seconds=0.001))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    @rule(rank=RANKS, non_block=st.booleans())
    def an_answer_is_lost(self, rank, non_block):
        self.plan(f"reply.before_send:2@{rank}=lose")  # the first passage is this call's own
        self.ask(timeout=SOON, non_block=non_block)
        self.ask()

    @rule(rank=RANKS, raising=st.sampled_from([(), (0, 1, 2)]))
    def an_answer_comes_twice(self, rank, raising):
        self.plan(f"reply.before_send:2@{rank}=duplicate")
        self.ask(raising=raising)
        self.ask()

    def plan(self, text):
        """Have a fault in every worker, at its next call."""
        before = self.lab.fired("reply.before_send")
        plan = f"{self.lab.folder}:{text}"
        self.group.collective_rpc(plan_in_worker, args=(plan,))
        self.expected_fault = before + 1

    @rule(kind=st.sampled_from(["lose", "duplicate"]), non_block=st.booleans())
    def a_call_is_lost_or_sent_twice(self, kind, non_block):
        before = self.lab.fired("call.before_send")
        fault.plan(f"{self.lab.folder}:call.before_send={kind}")
        try:
            self.ask(timeout=SOON, non_block=non_block)
        finally:
            fault.plan(None)
        assert self.lab.fired("call.before_send") == before + 1
        self.ask()

    @rule()
    def health(self):
        assert [report.rank for report in self.group.check_health(PATIENCE)] == list(range(SIZE))

    # What holds.

    @invariant()
    def every_end_is_its_own_and_the_only_one(self):
        wrong = [call for call in self.asked if len(call.ends) > 1 or any(call.ends)]
        assert not wrong
        if self.killed is None:
            assert self.group.failure is None
        expected = getattr(self, "expected_fault", None)
        assert expected is None or self.lab.fired("reply.before_send") == expected

    def teardown(self):
        last = getattr(self, "last", "nothing")
        if last == "kill":
            self.killed = self.lab.pids[1]
            self.ask(seconds=0.2, non_block=True)
            os.kill(self.killed, signal.SIGKILL)
            settle(lambda: self.group.failure is not None)
            assert isinstance(self.group.failure, WorkerDiedError)
        if last == "shutdown":
            self.ask(seconds=0.2, non_block=True)
            self.lab.end()
        settle(lambda: all(call.ends for call in self.asked))
        self.every_end_is_its_own_and_the_only_one()
        for future in self.futures:
            if not future.cancelled():
                self.lab.seen[type(future.exception(0)).__name__] += 1
        if last == "kill":
            self.lab.end()


def run(lab, examples):
    many = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        database=None,
        derandomize=False,  # as hypothesis would where CI is set: each run would be the same
        phases=[Phase.generate],  # a run is of this moment: smaller choices would show nothing
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(Machine, lab), settings=many)
    if lab.group is not None:
        lab.end()
    return lab.seen


@pytest.mark.parametrize("channel", ["shared_memory", "zmq"])
def test_every_answer_belongs_to_its_call(groups, tmp_path, channel):
    lab = Lab(groups, tmp_path, channel)
    kinds = ("NoneType", "RemoteError", "CallTimeoutError", "cancelled", "late")
    seen = run(lab, 6)
    for _ in range(10):
        if seen["calls"] >= 200 and all(seen[kind] for kind in kinds):
            return
        run(lab, 2)
    raise AssertionError(f"too little was seen: {seen}")


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["shared_memory", "zmq"])
def test_every_answer_belongs_to_its_call_for_long(groups, tmp_path, channel):
    seen = run(Lab(groups, tmp_path, channel), 20)
    assert seen["calls"] > 400
    assert min(seen[kind] for kind in ("RemoteError", "CallTimeoutError", "late")) > 10


def length(worker, data):
    return len(data)


@pytest.mark.parametrize(
    ("channel", "size", "count"),
    [pytest.param("shared_memory", 60 << 20, 6, marks=pytest.mark.slow), ("zmq", 1, 514)],
)
def test_a_timeout_holds_for_sending_too(groups, channel, size, count):
    """To a worker that takes nothing, more than the channel has room for."""
    executor = groups.ready(**{"plugins.mp.channel": channel, "plugins.dummy.silent_after": 60.0})
    victim = executor.collective_rpc(pid_of)[1]
    data = bytes(size)
    os.kill(victim, signal.SIGSTOP)
    began, ends = time.monotonic(), []
    for _ in range(count):
        try:
            ends.append(executor.collective_rpc(length, args=(data,), timeout=0.3, non_block=True))
        except CallTimeoutError:
            continue
    assert len(ends) < count, "there was room for all of it"
    assert {type(future.exception(PATIENCE)) for future in ends} == {CallTimeoutError}
    assert time.monotonic() - began < 0.3 * (count - len(ends) + 1) + SLACK
    os.kill(victim, signal.SIGCONT)
    assert executor.collective_rpc(length, args=(data,), timeout=PATIENCE) == [size] * SIZE
    settle(lambda: executor.calls.pending == 0)
