"""collective_rpc: order, arguments, timeouts, futures, correlation (rows R1 to R4, R6)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import weakref

import pytest
from hardpoint.errors import CallTimeoutError, LifecycleError, RemoteError


def whoami(worker, *args, **kwargs):
    return worker.rank, args, kwargs


def test_a_method_is_called_by_name_with_its_arguments(group, world_size):
    group.collective_rpc("update_max_model_len", kwargs={"max_model_len": 32})
    records = group.collective_rpc("recorded_calls")
    assert [calls[-1] for calls in records] == [("update_max_model_len", 32)] * world_size


def test_callables_of_every_kind_get_the_worker_first(group, world_size):
    offset = 10

    def local(worker, more):
        return worker.rank + offset + more

    ranks = range(world_size)
    assert group.collective_rpc(local, args=(1,)) == [rank + 11 for rank in ranks]
    assert group.collective_rpc(lambda worker: worker.rank * offset) == [r * 10 for r in ranks]
    assert group.collective_rpc(functools.partial(local, more=2)) == [r + 12 for r in ranks]
    assert group.collective_rpc(whoami) == [(rank, (), {}) for rank in ranks]


def test_an_unknown_method_is_one_typed_error_with_the_workers_class(group):
    close = {"recorded_cals": "did you mean recorded_calls"}
    for name in ("recorded_cals", "zzz", "rank"):
        with pytest.raises(RemoteError, match=r"DummyWorker has no method") as caught:
            group.collective_rpc(name)
        assert isinstance(caught.value.__cause__, AttributeError)
        assert name in str(caught.value)
        assert close.get(name, "known: ") in str(caught.value)
        assert "\n" not in str(caught.value)


def test_private_names_are_refused(group):
    for name in ("__init__", "_runner", "__class__", "_unsupported"):
        with pytest.raises(RemoteError, match="cannot be called"):
            group.collective_rpc(name)


def test_reply_rank_gives_one_bare_value_though_all_ranks_work(group, world_size):
    for rank in range(world_size):
        assert group.collective_rpc(whoami, reply_rank=rank) == (rank, (), {})
    group.collective_rpc("reset_prefix_cache", reply_rank=0)
    records = group.collective_rpc("recorded_calls")
    assert [calls[-1][0] for calls in records] == ["reset_prefix_cache"] * world_size


def test_a_reply_rank_that_is_none_is_refused(group):
    for rank in (-1, 99):
        with pytest.raises(ValueError, match=r"is not a rank \(world size"):
            group.collective_rpc(whoami, reply_rank=rank)


# Timeouts.


def test_a_timeout_beyond_any_wait_is_for_ever_and_harms_no_other(group, gate):
    for timeout in (float("inf"), 1e12):
        assert group.collective_rpc("supported_tasks", timeout=timeout)
        future = group.collective_rpc("supported_tasks", timeout=timeout, non_block=True)
        assert future.result(60)
    late = group.collective_rpc(gate.passing, args=gate.args, timeout=0.05, non_block=True)
    assert isinstance(late.exception(60), CallTimeoutError)
    gate.open()


def test_a_timeout_of_nothing_still_sends_the_call(group, gate, eventually):
    with pytest.raises(CallTimeoutError):
        group.collective_rpc(gate.passing, args=gate.args, timeout=0)
    gate.open()
    eventually(lambda: group.calls.pending == 0)


# Futures.


def test_waiting_for_a_result_in_vain_does_not_end_the_call(group, gate):
    future = group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert not future.done()
    gate.open()
    assert set(future.result(60)) == {"passed"}


def test_a_call_that_is_cancelled_while_it_queues_never_runs(group, gate, world_size):
    running = group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    gate.wait_entered(world_size)
    queued = group.collective_rpc("update_max_model_len", args=(7,), non_block=True)
    assert queued.cancel()
    assert not running.cancel()
    assert running.running()
    gate.open()
    assert running.result(60)
    done, _ = concurrent.futures.wait([queued], timeout=60)
    assert done == {queued}
    with pytest.raises(concurrent.futures.CancelledError):
        queued.result(0)
    for calls in group.collective_rpc("recorded_calls"):
        assert ("update_max_model_len", 7) not in calls
    assert group.calls.pending == 0


def test_a_caller_that_completes_its_own_future_harms_nobody(group, gate, world_size):
    held = group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    gate.wait_entered(world_size)
    queued = [group.collective_rpc(whoami, non_block=True) for _ in range(2)]
    queued[0].set_result("mine")
    queued[1].set_exception(KeyError("mine"))
    held.set_result("mine")
    gate.open()
    answers = group.collective_rpc(whoami, non_block=True)
    assert answers.result(60) == [(rank, (), {}) for rank in range(world_size)]
    assert held.result(0) == queued[0].result(0) == "mine"
    assert len(group.check_health()) == world_size


def test_futures_can_be_awaited(group, world_size):
    async def ask():
        return await asyncio.wrap_future(group.collective_rpc(whoami, non_block=True))

    assert asyncio.run(ask()) == [(rank, (), {}) for rank in range(world_size)]


def test_a_dropped_future_leaves_nothing_behind(group, eventually):
    gone = [weakref.ref(group.collective_rpc(whoami, non_block=True)) for _ in range(50)]
    group.collective_rpc(whoami)
    eventually(lambda: group.calls.pending == 0)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 50


def test_a_blocking_call_from_the_workers_thread_is_refused_not_a_deadlock(group, gate):
    held = group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    raised = []

    def callback(_):  # runs on the thread that completes the future
        if not group.called_from_worker():
            return
        with pytest.raises(LifecycleError, match="use non_block=True") as caught:
            group.collective_rpc(whoami)
        raised.append(caught.value)
        group.collective_rpc(whoami, non_block=True)

    held.add_done_callback(callback)
    gate.open()
    held.result(60)
    group.collective_rpc(whoami)
    if hasattr(group, "_group"):  # one worker is on a thread of this process, the others are not
        assert len(raised) <= 1
    else:
        assert len(raised) == (hasattr(group, "_thread") or hasattr(group, "_threads"))


# Payloads and correlation.


def test_a_large_argument_travels(group):
    for kind in (bytes, bytearray):
        data = kind(64 << 20)
        assert set(group.collective_rpc(length_of, args=(data,))) == {64 << 20}


def length_of(worker, data):
    return len(data)
