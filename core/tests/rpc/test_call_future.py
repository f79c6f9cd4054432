"""A future that becomes one only when more than its result is asked for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future

import pytest
from hardpoint.errors import RemoteError
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, CallTable, RemoteFailure, Reply


class One:
    """One call of one rank, and its future."""

    def __init__(self):
        self.table = CallTable()
        self.call = Call(call_id=self.table.next_id(), generation=0, method="x")
        self.gather = self.table.open(self.call, 1)
        self.future = self.gather.future

    def begin(self):
        return self.table.begin(self.call.call_id)

    def end(self, error=None):
        failure = None if error is None else RemoteFailure.of(error)
        value = None if error else codec.pack(7, "value")
        self.table.deliver(Reply(self.call.call_id, 0, 0, value, failure))

    def plain(self):
        """Whether nobody has asked for more than the result."""
        return "_condition" not in vars(self.future)


@pytest.fixture
def one():
    return One()


def soon(action):
    thread = threading.Timer(0.05, action)
    thread.start()
    return thread


def test_the_result_alone_is_waited_for_without_a_future(one):
    assert one.begin()
    soon(one.end)
    assert one.future.result() == [7]
    assert one.plain()


def test_an_error_alone_is_raised_without_a_future(one):
    one.end(ZeroDivisionError())
    with pytest.raises(RemoteError) as caught:
        one.future.result()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert one.plain()
    assert one.future.exception(0) is caught.value


def test_it_is_one_and_the_same(one):
    assert one.gather.future is one.future
    assert not one.future.done()
    assert one.gather.future is one.future
    assert isinstance(one.future, Future)


ASKED = {
    "done": lambda future: future.done() or None,
    "result": lambda future: future.result(10),
    "exception": lambda future: future.exception(10) is None or None,
    "wait": lambda future: concurrent.futures.wait([future], 10).done.pop().result(0),
    "loop": lambda future: asyncio.run(awaited(future)),
}


async def awaited(future):
    return await asyncio.wrap_future(future)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("moment", ["before", "begun", "after"])
def test_it_becomes_a_future_whenever_it_is_asked_for_what_that_has(one, asked, moment):
    heard = []
    if moment == "begun":
        one.begin()
    if moment == "after":
        one.end()
    else:
        soon(one.end)
    found = ASKED[asked](one.future)
    assert found in (None, 7, [7], True)
    one.future.add_done_callback(heard.append)
    assert one.future.result(10) == [7]
    assert one.future.done()
    assert heard == [one.future]
    assert not one.plain()


def test_without_the_end_it_is_waited_for_as_long_as_was_said(one):
    with pytest.raises(concurrent.futures.TimeoutError):
        one.future.result(0.01)


def test_it_runs_from_when_the_worker_has_begun(one):
    assert one.begin()
    assert one.future.running()
    assert not one.future.cancel()
    one.end()
    assert one.future.result() == [7]


def test_a_cancelled_one_is_not_begun(one):
    assert one.future.cancel()
    assert not one.begin()
    assert one.future.cancelled()
    assert one.table.pending == 0


def test_who_waits_for_its_result_hears_that_it_was_cancelled(one):
    soon(one.future.cancel)
    with pytest.raises(CancelledError):
        one.future.result()


def test_nothing_is_left_of_it():
    """No cycle: there would be one for each step."""
    gc.disable()
    try:
        for ask in (Future.done, Future.result):
            one = One()
            one.end()
            ask(one.future)
            refs = [weakref.ref(one.future), weakref.ref(one.gather)]
            del one
            assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_it_becomes_a_future_once_however_many_threads_ask():
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        one, heard = One(), []
        gate = threading.Barrier(4)

        def ask(one=one, heard=heard, gate=gate):
            gate.wait()
            one.future.add_done_callback(heard.append)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        gate.wait()
        one.end()
        for thread in threads:
            thread.join()
        assert heard == [one.future] * 3


def test_what_it_has_not_it_does_not_get(one):
    with pytest.raises(AttributeError):
        one.future.unknown  # noqa: B018 - it is looked up
    assert not hasattr(one.future, "_unknown")
