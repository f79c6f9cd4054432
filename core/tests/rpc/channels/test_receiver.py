"""Who takes the replies: the caller that waits, or the thread, and never nobody."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest
from hardpoint.errors import CallTimeoutError, ExecutorFailedError
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.claims import CallerClaims
from hardpoint.rpc.shared_memory import bell
from hardpoint.rpc.shared_memory.ends import call_layout

PATIENCE = 30.0


def reply_threads():
    return [each for each in threading.enumerate() if each.name == "hardpoint-replies"]


@pytest.fixture
def group(kind, make_group):
    return make_group(kind, 2, near=True)


def test_a_caller_that_waits_needs_no_other_thread(group):
    for number in range(20):
        assert group.call("echo", number) == [number] * 2
    assert reply_threads() == []


def test_a_future_completes_though_nobody_waits(group):
    done = threading.Event()
    future = group.call("echo", 3, non_block=True)
    future.add_done_callback(lambda _: done.set())
    assert done.wait(PATIENCE)
    assert future.result(0) == [3, 3]
    assert len(reply_threads()) == 1


def test_a_caller_that_waits_is_served_while_others_futures_are_open(group, tmp_path):
    for number in range(30):
        futures = [group.call("echo", (number, each), non_block=True) for each in range(5)]
        assert group.call("echo", number) == [number] * 2
        assert [f.result(PATIENCE) for f in futures] == [[(number, e)] * 2 for e in range(5)]


def test_many_threads_call_at_once_and_each_gets_its_own(kind, make_group):
    group = make_group(kind, 2, near=True)
    wrong = []

    def call(source):
        for _ in range(40):
            value = source.random()
            if source.random() < 0.3:
                got = group.call("echo", value, non_block=True).result(PATIENCE)
            else:
                got = group.call("echo", value)
            if got != [value] * 2:
                wrong.append((value, got))

    threads = [threading.Thread(target=call, args=(random.Random(seed),)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert group.table.pending == 0


def test_a_callback_may_call_and_wait(group):
    answers = []
    finished = threading.Event()

    def then(_):
        answers.append(group.call("echo", "again"))
        finished.set()

    group.call("echo", 1, non_block=True).add_done_callback(then)
    group.call("echo", 2)  # this thread may be the one that runs the callback
    assert finished.wait(PATIENCE)
    assert answers == [["again"] * 2]


def test_one_that_stands_by_takes_over_from_a_caller_that_leaves(group, tmp_path, wait_until):
    """Even if it is the thread, in a callback: nobody else would take the replies."""
    answers = []
    begun, waiting, finished = threading.Event(), threading.Event(), threading.Event()

    def then(_):
        begun.set()
        assert waiting.wait(PATIENCE)
        answers.append(group.call("gate", tmp_path / "in2", tmp_path / "open2"))
        finished.set()

    first = group.call("gate", tmp_path / "in0", tmp_path / "open0", non_block=True)
    first.add_done_callback(then)
    (tmp_path / "open0").touch()
    assert begun.wait(PATIENCE)
    caller = threading.Thread(
        target=group.call, args=("gate", tmp_path / "in1", tmp_path / "open1")
    )
    caller.start()
    wait_until(lambda: len(list(tmp_path.glob("in1.*"))) == 2 and group.receiver._turn.locked())
    waiting.set()
    wait_until(lambda: group.table.pending == 2)
    time.sleep(0.05)  # for it to stand by; should it not yet, it has the turn for itself
    (tmp_path / "open1").touch()
    caller.join(PATIENCE)
    assert not caller.is_alive()
    (tmp_path / "open2").touch()
    assert finished.wait(PATIENCE)
    assert len(answers) == 1


def test_a_wait_ends_at_its_deadline(group, tmp_path):
    began = time.monotonic()
    with pytest.raises(CallTimeoutError):
        group.call("gate", tmp_path / "in", tmp_path / "open", timeout=0.2)
    assert 0.2 <= time.monotonic() - began < 5
    (tmp_path / "open").touch()


def test_a_failure_of_all_calls_wakes_every_caller(group, tmp_path, wait_until):
    raised = []

    def call():
        try:
            group.call("gate", tmp_path / "in", tmp_path / "open")
        except ExecutorFailedError as error:
            raised.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: group.table.pending == 3)
    time.sleep(0.01)  # beyond the time for which they yield
    began = time.monotonic()
    group.table.fail_all(ExecutorFailedError("all over"))
    for thread in threads:
        thread.join(PATIENCE)
    assert time.monotonic() - began < 0.5 * bell.SAFETY_S, "woken, not found by chance"
    assert [str(error) for error in raised] == ["all over"] * 3
    (tmp_path / "open").touch()


def test_closing_frees_a_caller_from_the_channel(group, tmp_path, wait_until):
    ended = threading.Event()

    def call():
        with pytest.raises(ExecutorFailedError):
            group.call("gate", tmp_path / "in", tmp_path / "open")
        ended.set()

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: len(list(tmp_path.glob("in.*"))) == 2)
    group.receiver.close()
    group.end.close()
    assert not ended.is_set()
    group.table.fail_all(ExecutorFailedError("shut down"))
    assert ended.wait(PATIENCE)
    thread.join()
    (tmp_path / "open").touch()


def test_a_failure_frees_a_sender_that_has_no_room(kind, make_group):
    group = make_group(kind, 1, near=True, start=False)
    worker = group.attach(0)  # which takes no call
    raised = []

    def fill():
        try:
            for _ in range(100_000):
                group.call("echo", bytes(4000), non_block=True, timeout=None)
        except ChannelClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(0.5)
    if kind == "shared_memory":
        assert thread.is_alive()
    group.receiver.abandon()
    thread.join(PATIENCE)
    assert len(raised) == 1
    group.receiver.close()
    group.end.close()
    with pytest.raises(ChannelClosedError):
        take_all(worker)
    worker.close()


def take_all(worker):
    while worker.receive(PATIENCE) is not None:
        pass


@pytest.mark.parametrize("spin_us", [0.0, 50.0, 200.0])
def test_no_wake_up_is_lost(make_group, monkeypatch, spin_us):
    """With no end of a sleep but a wake-up: one that is lost is a time-out here."""
    monkeypatch.setattr(bell, "SAFETY_S", 1000.0)
    group = make_group("shared_memory", 2, near=True, spin_us=spin_us)
    source = random.Random(int(spin_us))
    waiting = []
    for number in range(400):
        time.sleep(source.choice([0, 0, spin_us * 1e-6, spin_us * 3e-6]))
        if source.random() < 0.3:
            waiting.append((number, group.call("echo", number, non_block=True)))
        else:
            assert group.call("echo", number, timeout=60) == [number] * 2
    assert [future.result(60) for _, future in waiting] == [[number] * 2 for number, _ in waiting]


# Futures of calls that can be taken back: whoever asks for a result waits at the channel itself.


@pytest.fixture
def gated(make_group, tmp_path):
    """A group whose workers wait in a call until a file is there; what opens it; its future."""
    group = make_group("shared_memory", 2, near=True)
    group.table.claims = claims = CallerClaims(2)
    claims.wait = group.receiver.wait
    opened = tmp_path / "opened"
    yield group, opened.touch, group.call("gate", str(tmp_path / "in"), str(opened), non_block=True)
    opened.touch()
    claims.close()


def ask(future, **how):
    """Ask for a result on a thread; return that, and what becomes of it."""
    ends = []

    def run():
        try:
            ends.append(future.result(**how))
        except BaseException as error:
            ends.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def test_who_asks_for_a_result_takes_the_replies(gated, wait_until):
    group, let, future = gated
    heard = []
    future.add_done_callback(lambda _: heard.append(threading.get_ident()))
    thread, ends = ask(future)
    wait_until(lambda: group.receiver._owner == thread.ident)
    let()
    thread.join(PATIENCE)
    assert ends == [[0, 1]]
    assert heard == [thread.ident]


def test_all_who_ask_for_a_result_get_it(gated, wait_until):
    group, let, future = gated
    asked = [ask(future) for _ in range(4)]
    wait_until(lambda: len(group.receiver._standing_by) == 3)
    with pytest.raises(TimeoutError):
        future.result(0.05)
    let()
    for thread, ends in asked:
        thread.join(PATIENCE)
        assert ends == [[0, 1]]
    assert future.exception(0) is None


def test_a_call_taken_back_ends_the_wait_for_it(gated, wait_until):
    group, let, busy = gated
    future = group.call("echo", 1, non_block=True)
    thread, ends = ask(future)
    wait_until(lambda: group.receiver._owner == thread.ident)
    assert future.cancel()
    thread.join(PATIENCE)
    assert ends == [CancelledError]
    assert not busy.done()
    let()
    assert busy.result(PATIENCE) == [0, 1]
    wait_until(lambda: group.table.pending == 0 or group.call("echo", 2))


def test_a_failure_of_all_ends_every_wait(gated, wait_until):
    group, _, future = gated
    asked = [ask(future) for _ in range(3)]
    wait_until(lambda: len(group.receiver._standing_by) == 2)
    group.table.fail_all(ExecutorFailedError("all"))
    for thread, ends in asked:
        thread.join(PATIENCE)
        assert ends == [ExecutorFailedError]


def test_a_future_and_what_it_waits_for_are_no_cycle(make_group):
    group = make_group("shared_memory", 1, near=True)
    group.table.claims = claims = CallerClaims(1)
    claims.wait = group.receiver.wait
    gc.disable()
    try:
        future = group.call("echo", 1, non_block=True)
        gone = weakref.ref(future)
        assert future.result(PATIENCE) == [1]
        group.call("echo", 2)
        del future
        assert gone() is None
    finally:
        gc.enable()
        claims.close()


def sleeper(group, rank=0):
    """Have a worker of its own thread fall asleep; return the thread, and what it will have got."""
    end, got = group.attach(rank), []
    thread = threading.Thread(target=lambda: got.append(end.receive(PATIENCE)), daemon=True)
    thread.start()
    return thread, got


def flag(group):
    """The word by which the only worker asks to be woken."""
    return call_layout(group.end._data).sleeps(0)


@pytest.fixture
def rung(monkeypatch):
    """What was rung, by event."""
    rings = []
    wake = bell.Event.wake
    monkeypatch.setattr(bell.Event, "wake", lambda event: (rings.append(event), wake(event)))
    return rings


def test_workers_that_sleep_are_woken_before_the_call_is_made(make_group, rung, wait_until):
    group = make_group("python", 1, start=False)
    thread, got = sleeper(group)
    words, sleeps, [worker] = group.end._words, flag(group), group.end._workers
    wait_until(lambda: words[sleeps])
    group.end.rouse()
    assert rung == [worker]
    wait_until(lambda: words[sleeps])  # nothing came: it sleeps again
    group.end.send(group.make("rank_of"))
    thread.join(PATIENCE)
    assert [call.name for call in got] == ["rank_of"]
    assert rung == [worker, worker]


def test_after_a_large_call_workers_sleep_until_the_next_is_nearly_there(make_group, rung):
    group = make_group("python", 1, start=False)
    group.end.send(group.make("echo", bytes(1 << 20)))
    words, sleeps, [worker] = group.end._words, flag(group), group.end._workers
    words[sleeps] = 1
    group.end.rouse()
    assert rung == []
    group.end.send(group.make("echo", bytes(1 << 20)))
    assert rung == [worker]
