"""The call table: every call ends exactly once, with its own answer, whatever the channel does."""

from __future__ import annotations

import concurrent.futures
import heapq
import operator
import random
import threading
from functools import partial

import pytest
from hardpoint.errors import CallTimeoutError, ExecutorFailedError, RemoteError
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, CallTable, RemoteFailure, Reply
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

GENERATION = 3


def make_call(table, **fields):
    return Call(call_id=table.next_id(), generation=GENERATION, method="m", **fields)


def reply_to(call, rank, *, value=None, fail=False, generation=GENERATION):
    failure = RemoteFailure.of(ValueError(call.call_id, rank)) if fail else None
    packed = None if fail else codec.pack((call.call_id, rank, value), "value")
    return Reply(
        call_id=call.call_id, rank=rank, generation=generation, value=packed, failure=failure
    )


class Watched:
    """A call, what a plain model says of its end, and how often its future was completed."""

    def __init__(self, call, world_size, future):
        self.call = call
        self.world_size = world_size
        self.future = future
        self.answered = {}
        self.end = None
        self.completions = 0
        self.begun = False
        future.add_done_callback(self._completed)

    def _completed(self, _):
        self.completions += 1

    def expected_value(self):
        rank = self.call.reply_rank
        everything = [(self.call.call_id, each, None) for each in range(self.world_size)]
        return everything if rank is None else everything[rank]

    def check(self):
        if self.end is None:
            assert not self.future.done()
            assert self.completions == 0
            return
        assert self.completions == 1, "a call ends exactly once"
        if self.end == "cancelled":
            assert self.future.cancelled()
        elif self.end == "value":
            assert self.future.result(0) == self.expected_value()
        else:
            error = self.future.exception(0)
            kind, detail = self.end
            assert isinstance(error, kind)
            if kind is RemoteError:
                assert error.__cause__.args == (self.call.call_id, detail)
                assert error.rank == detail


class Channel(RuleBasedStateMachine):
    """Loses, doubles, delays, reorders and forges replies; cancels, expires and fails calls."""

    def __init__(self):
        super().__init__()
        self.table = CallTable()
        self.calls = []
        self.failed = None

    @initialize()
    def open_some(self):
        for world_size in (2, 1, 3):
            self.open(world_size, -1)

    @precondition(lambda self: len(self.calls) < 8)
    @rule(world_size=st.integers(1, 3), which=st.integers(-1, 2))
    def open(self, world_size, which):
        reply_rank = which if 0 <= which < world_size else None
        call = make_call(self.table, reply_rank=reply_rank)
        if self.failed is not None:
            with pytest.raises(ExecutorFailedError):
                self.table.open(call, world_size)
            return
        future = self.table.open(call, world_size).future
        self.calls.append(Watched(call, world_size, future))

    def pick(self, data):
        return self.calls[data.draw(st.integers(0, len(self.calls) - 1), label="call")]

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), rank=st.integers(-1, 3), fail=st.booleans())
    def deliver(self, data, rank, fail):
        watched = self.pick(data)
        self.table.deliver(reply_to(watched.call, rank, fail=fail))
        if not 0 <= rank < watched.world_size or rank in watched.answered or self.failed:
            return
        watched.answered[rank] = fail
        if watched.end is None and fail:
            watched.end = (RemoteError, rank)
        elif watched.end is None and len(watched.answered) == watched.world_size:
            watched.end = "value"

    @precondition(lambda self: any(watched.answered for watched in self.calls))
    @rule(data=st.data(), fail=st.booleans())
    def deliver_again(self, data, fail):
        answered = [watched for watched in self.calls if watched.answered]
        watched = data.draw(st.sampled_from(answered), label="call")
        rank = data.draw(st.sampled_from(sorted(watched.answered)), label="rank")
        before = self.table.late_replies
        self.table.deliver(reply_to(watched.call, rank, fail=fail))
        assert self.table.late_replies == before + 1

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), rank=st.integers(0, 2), generation=st.integers(0, 5))
    def deliver_of_another_generation(self, data, rank, generation):
        if generation != GENERATION:
            watched = self.pick(data)
            before = self.table.late_replies
            self.table.deliver(reply_to(watched.call, rank, generation=generation))
            assert self.table.late_replies == before + 1

    @rule(number=st.integers(10_000, 20_000))
    def deliver_to_nobody(self, number):
        before = self.table.late_replies
        self.table.deliver(Reply(call_id=number, rank=0, generation=GENERATION))
        assert self.table.late_replies == before + 1

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def expire(self, data):
        watched = self.pick(data)
        self.table.expire(watched.call.call_id)
        if watched.end is None:
            watched.end = (CallTimeoutError, None)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def begin(self, data):
        watched = self.pick(data)
        wanted = self.table.begin(watched.call.call_id)
        complete = len(watched.answered) == watched.world_size
        assert wanted == (watched.end != "cancelled" and not complete and self.failed is None)
        watched.begun = watched.begun or wanted

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data):
        watched = self.pick(data)
        done = watched.future.cancel()
        assert done == (watched.end == "cancelled" or (watched.end is None and not watched.begun))
        if done:
            watched.end = "cancelled"

    @precondition(lambda self: len(self.calls) >= 4)
    @rule()
    def fail_all(self):
        error = ExecutorFailedError("ended")
        self.table.fail_all(error)
        self.failed = self.failed or error
        for watched in self.calls:
            watched.end = watched.end or (ExecutorFailedError, None)

    @invariant()
    def every_call_is_as_the_model_says(self):
        for watched in self.calls:
            watched.check()

    @invariant()
    def nothing_is_pending_but_what_is_unanswered(self):
        unanswered = {
            watched.call.call_id
            for watched in self.calls
            if len(watched.answered) < watched.world_size
        }
        assert self.table.pending <= len(unanswered)
        if self.failed is not None:
            assert self.table.pending == 0

    def teardown(self):
        note(f"{len(self.calls)} calls")
        self.table.fail_all(ExecutorFailedError("end of the run"))
        futures = [watched.future for watched in self.calls]
        assert concurrent.futures.wait(futures, timeout=0).not_done == set()


Channel.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestChannel = Channel.TestCase


# A simulation on a clock of its own: one seed is one history.


class Simulation:
    """A driver, some workers, and a channel that loses, doubles and delays, on a seeded clock."""

    def __init__(self, seed, calls=60, world_size=3):
        self.random = random.Random(seed)
        self.world_size = world_size
        self.table = CallTable()
        self.events = []
        self.history = []
        self.sequence = 0
        self.ends = {}
        for _ in range(calls):
            self.at(self.random.uniform(0, 50), self.send)

    def at(self, time, action, *args):
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, action, args))

    def run(self):
        while self.events:
            self.now, _, action, args = heapq.heappop(self.events)
            action(*args)
        self.table.fail_all(ExecutorFailedError("the simulation ends"))
        return self.history

    def send(self):
        call = make_call(self.table, timeout=5.0)
        future = self.table.open(call, self.world_size).future
        future.add_done_callback(lambda done, call=call: self.ended(call, done))
        self.at(self.now + 5.0, self.table.expire, call.call_id)
        for rank in range(self.world_size):
            copies = self.random.choices([0, 1, 2], [1, 12, 2])[0]
            for _ in range(copies):
                fail = self.random.random() < 0.05
                delay = self.random.expovariate(0.5)
                self.at(self.now + delay, self.table.deliver, reply_to(call, rank, fail=fail))

    def ended(self, call, future):
        assert call.call_id not in self.ends, "a call ends exactly once"
        error = future.exception(0)
        if error is None:
            assert future.result(0) == [(call.call_id, r, None) for r in range(self.world_size)]
        elif isinstance(error, RemoteError):
            assert error.__cause__.args == (call.call_id, error.rank)
        self.ends[call.call_id] = type(error).__name__
        self.history.append((round(self.now, 9), call.call_id, type(error).__name__))


def test_a_seed_replays_its_history_and_every_call_ends_once():
    seeds = [random.SystemRandom().randrange(2**32) for _ in range(20)]
    print(f"seeds: {seeds}")
    outcomes = set()
    for seed in seeds:
        simulation = Simulation(seed)
        history = simulation.run()
        assert len(simulation.ends) == 60, f"seed {seed}"
        assert Simulation(seed).run() == history, f"seed {seed}"
        outcomes |= {end for _, _, end in history}
    assert {"NoneType", "CallTimeoutError", "RemoteError"} <= outcomes, "every fault has fired"


def test_threads_that_race_end_each_call_once():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed: {seed}")
    source = random.Random(seed)
    table = CallTable()
    watched = []
    for _ in range(300):
        call = make_call(table)
        watched.append(Watched(call, 2, table.open(call, 2).future))
    work = [(table.deliver, (reply_to(w.call, rank),)) for w in watched for rank in (0, 1)]
    work += [(table.expire, (w.call.call_id,)) for w in source.sample(watched, 100)]
    work += [(w.future.cancel, ()) for w in source.sample(watched, 50)]
    work += [(table.begin, (w.call.call_id,)) for w in source.sample(watched, 100)]
    source.shuffle(work)

    def run(part):
        for action, args in part:
            action(*args)

    threads = [threading.Thread(target=run, args=(work[index::4],)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [w.completions for w in watched] == [1] * 300, f"seed {seed}"
    assert table.pending == 0, f"seed {seed}"


# What people see.


def test_a_timeout_names_the_call_and_the_ranks_that_are_silent():
    table = CallTable()
    call = make_call(table, timeout=1.5)
    future = table.open(call, 3).future
    table.deliver(reply_to(call, 1))
    table.expire(call.call_id)
    with pytest.raises(
        CallTimeoutError, match=r"'m' was not answered within 1.5 s by ranks \[0, 2"
    ):
        future.result(0)
    assert table.pending == 1
    table.deliver(reply_to(call, 0))
    table.deliver(reply_to(call, 2))
    assert (table.pending, table.late_replies) == (0, 2)


def test_a_call_has_the_name_of_its_callable():
    assert make_call(CallTable()).name == "m"
    call = Call(call_id=1, generation=0, method=test_a_call_has_the_name_of_its_callable)
    assert call.name == "test_a_call_has_the_name_of_its_callable"
    bound = partial(partial(make_call, token="secret"), "secret")  # goes to messages and logs
    assert Call(call_id=1, generation=0, method=bound).name == "make_call"
    getter = operator.attrgetter("secret")
    assert Call(call_id=1, generation=0, method=getter).name == "attrgetter"


def test_a_call_that_was_cancelled_counts_as_done_for_waiters_when_it_is_reached():
    table = CallTable()
    call = make_call(table)
    future = table.open(call, 1).future
    assert future.cancel()
    assert not table.begin(call.call_id)
    assert concurrent.futures.wait([future], timeout=0).done == {future}
    assert table.pending == 0
