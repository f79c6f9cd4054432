"""Taking a queued call back from workers that begin calls unasked: all run it, or none."""

from __future__ import annotations

import os
import random
import threading
from types import SimpleNamespace

import pytest
from hardpoint.rpc.calls import Call, CallTable, Reply
from hardpoint.rpc.claims import SLOTS, CallerClaims, WorkerClaims


@pytest.fixture
def board():
    claims = CallerClaims(2)
    workers = [WorkerClaims(os.dup(claims.fd), 2, rank) for rank in range(2)]
    yield claims, workers
    for each in (claims, *workers):
        each.close()
        each.close()


def test_what_is_taken_back_first_runs_nowhere(board):
    claims, workers = board
    assert claims.take_back(7)
    assert claims.take_back(7)
    assert [worker.begin(7) for worker in workers] == [False, False]
    assert claims.take_back(7)


def test_what_one_worker_has_begun_runs_everywhere(board):
    claims, workers = board
    assert not claims.begun(7)
    assert workers[1].begin(7)
    assert claims.begun(7)
    assert not claims.take_back(7)
    assert not claims.take_back(7)
    assert workers[0].begin(7)


def test_a_slot_is_used_again_only_when_every_worker_has_passed_its_call(board):
    claims, workers = board
    assert claims.take_back(1)
    assert not claims.take_back(1 + SLOTS)
    assert not workers[0].begin(1)
    assert not claims.take_back(1 + SLOTS)
    assert not workers[1].begin(1)
    assert claims.take_back(1 + SLOTS)
    assert [worker.begin(1 + SLOTS) for worker in workers] == [False, False]
    assert workers[0].begin(1 + 2 * SLOTS)


def test_nothing_is_taken_back_where_stores_have_no_order(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    claims = CallerClaims(1)
    worker = WorkerClaims(os.dup(claims.fd), 1, 0)
    try:
        assert not claims.take_back(7)
        assert worker.begin(7)
    finally:
        worker.close()
        claims.close()


def test_nothing_can_be_taken_back_once_closed():
    claims = CallerClaims(1)
    claims.close()
    assert not claims.take_back(1)
    assert not claims.begun(1)


def test_a_slot_is_not_used_again_while_a_worker_is_about_to_look_at_it(board):
    claims, (first, second) = board
    assert claims.take_back(7)
    assert not second.begin(7)
    fence, again = first._fence, []

    def looked_at_later():
        fence()
        again.append(claims.take_back(7 + SLOTS))

    first._fence = looked_at_later
    assert not first.begin(7)
    assert again == [False]
    assert claims.take_back(7 + SLOTS)


def test_a_call_that_was_kept_runs_though_its_slot_is_another_calls_by_now(board, monkeypatch):
    """The caller can be quick: it keeps this call, and takes one back that has the same slot, while
    a worker waits for its word.
    """
    claims, (first, second) = board
    words = claims._memory.words
    words[7] = 7 << 2 | 1  # asked

    def go_on():
        words[7] = 7 << 2 | 3  # kept
        assert claims.take_back(7 + SLOTS)

    assert second.begin(3)
    monkeypatch.setattr(os, "sched_yield", go_on)
    assert first.begin(7)
    assert not second.begin(7 + SLOTS)
    assert not first.begin(7 + SLOTS)


def race(fd, rank, calls, answers):
    """In a process of its own: begin every call; write down which."""
    claims = WorkerClaims(fd, 2, rank)
    ran = bytes(claims.begin(call) for call in range(1, calls + 1))
    os.write(answers, ran)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("seed", range(3))
def test_in_a_race_all_workers_and_the_caller_agree(seed):
    calls = 2000
    claims = CallerClaims(2)
    pipes = [os.pipe() for _ in range(2)]
    children = []
    for rank, (_, write) in enumerate(pipes):
        child = os.fork()
        if child == 0:
            race(claims.fd, rank, calls, write)
        children.append(child)
    source = random.Random(seed)
    taken = {
        call for call in range(1, calls + 1) if source.random() < 0.5 and claims.take_back(call)
    }
    ran = []
    for child, (read, write) in zip(children, pipes, strict=True):
        os.waitpid(child, 0)
        os.close(write)
        ran.append({index + 1 for index, each in enumerate(os.read(read, calls)) if each})
        os.close(read)
    claims.close()
    assert ran[0] == ran[1] == set(range(1, calls + 1)) - taken


# The future of such a call.


@pytest.fixture
def table(board):
    table = CallTable()
    table.claims = board[0]
    return table


def opened(table):
    call = Call(call_id=table.next_id(), generation=0, method="x")
    gather = table.open(call, 2)
    return call, gather.future


def acknowledge(table, call, rank, value=None):
    table.deliver(Reply(call_id=call.call_id, rank=rank, generation=0, value=value))


def test_a_future_is_cancelled_if_nobody_has_begun_and_ends_when_all_have_passed(table, board):
    call, future = opened(table)
    assert not future.running()
    assert future.cancel()
    for rank, worker in enumerate(board[1]):
        assert not worker.begin(call.call_id)
        acknowledge(table, call, rank)
    assert future.cancelled()
    assert table.pending == 0


def test_a_future_runs_from_when_a_worker_began_and_cannot_be_cancelled(table, board):
    call, future = opened(table)
    assert board[1][0].begin(call.call_id)
    assert future.running()
    assert not future.cancel()
    acknowledge(table, call, 0)
    acknowledge(table, call, 1)
    assert future.result(0) == [None, None]
    assert not future.running()
    assert not future.cancel()


def test_a_cancelled_future_wakes_who_waits(table):
    _, future = opened(table)
    heard = threading.Event()
    future.add_done_callback(lambda _: heard.set())
    assert future.cancel()
    assert heard.wait(0)


def test_a_failure_of_all_takes_back_what_nobody_has_begun(table, board):
    """A worker that was stopped meanwhile, and goes on, must not do what was given up."""
    calls = [Call(call_id=table.next_id(), generation=0, method="x", queued=True) for _ in range(3)]
    futures = [table.open(call, 2).future for call in calls]
    first, second = board[1]
    assert first.begin(calls[0].call_id)
    table.fail_all(ZeroDivisionError())
    assert [type(future.exception(0)) for future in futures] == [ZeroDivisionError] * 3
    assert [second.begin(call.call_id) for call in calls] == [True, False, False]
    assert not first.begin(calls[1].call_id)
