"""The end that is wanted, in time and without a trace (case B22; rows E3c, X18; flaws 9, 11)."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
from hardpoint.errors import ExecutorFailedError
from hardpoint_multiproc.shutdown_time import shares

START = ["nursery", "plain"]


def slow_to_shut_down(worker, seconds, path):
    shut_down = worker.shutdown

    def slowly():
        time.sleep(seconds)
        Path(path).touch()
        shut_down()

    worker.shutdown = slowly


def deaf(worker, seconds):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(seconds)


def spin(worker, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("start", START)
def test_a_worker_that_needs_less_than_the_deadline_finishes(
    launcher, tmp_path, stopwatch, start, caplog
):
    executor = launcher.start(**{"plugins.mp.start": start})
    marker = tmp_path / "done"
    executor.collective_rpc(slow_to_shut_down, args=(0.8, str(marker)))
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        began = time.monotonic()
        with stopwatch() as clock:
            executor.shutdown(timeout=60)
        took = time.monotonic() - began
    assert marker.exists()
    assert took >= 0.8
    assert clock.seconds < 3
    assert caplog.text == ""


def test_the_time_of_a_shutdown_is_the_workers_but_for_little():
    for span in (0.05, 0.5, 2.0, 10.0, 60.0):
        term, kill = shares(100.0, 100.0 + span, failed=False)
        assert 100.0 <= term <= kill < 100.0 + span
        assert term >= 100.0 + 0.7 * span - 0.01
        assert kill >= 100.0 + span - 0.31
    assert shares(100.0, 160.0, failed=True)[1] <= 101.0
    assert shares(100.0, 99.0, failed=False) == (100.0, 100.0)


@pytest.mark.parametrize("start", START)
def test_a_worker_deaf_to_sigterm_is_killed_and_reported(
    launcher, pids, is_alive, eventually, stopwatch, start, caplog
):
    executor = launcher.start(**{"plugins.mp.start": start})
    workers = pids(executor)
    future = executor.collective_rpc(deaf, args=(1000,), non_block=True)
    eventually(lambda: all(each.busy_since for each in executor.check_health()))
    with caplog.at_level(logging.WARNING, logger="hardpoint"), stopwatch() as clock:
        executor.shutdown(timeout=1.5)
    assert clock.seconds < 4
    assert not any(map(is_alive, workers))
    for rank, pid in enumerate(workers):
        assert f"worker rank {rank} (pid {pid}) was still busy" in caplog.text
    assert caplog.text.count("SIGTERM, then SIGKILL") == 2
    assert isinstance(future.exception(60), ExecutorFailedError)


def test_a_worker_that_hears_sigterm_leaves_its_call_and_shuts_down(launcher, tmp_path, eventually):
    executor = launcher.start()
    marker = tmp_path / "done"
    executor.collective_rpc(slow_to_shut_down, args=(0, str(marker)))
    executor.collective_rpc(spin, args=(1000,), non_block=True)
    eventually(lambda: all(each.busy_since for each in executor.check_health()))
    executor.shutdown(timeout=2)
    assert marker.exists()


def test_a_stopped_worker_does_not_keep_a_shutdown_from_ending(
    launcher, stop, pids, is_alive, stopwatch
):
    executor = launcher.start()
    workers = pids(executor)
    stop(workers[1])
    with stopwatch() as clock:
        executor.shutdown(timeout=1.5)
    assert clock.seconds < 4
    assert not any(map(is_alive, workers))


def test_times_beyond_any_wait_are_taken(launcher):
    executor = launcher.start(**{"rpc.heartbeat": 1e300, "plugins.mp.start_timeout": 1e300})
    assert len(executor.check_health(1e300)) == 2
    executor.shutdown(1e300)


def test_a_second_shutdown_does_nothing_even_at_the_same_time(launcher):
    executor = launcher.start()
    threads = [threading.Thread(target=executor.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    executor.shutdown()


def test_a_shutdown_from_the_failure_callback_works(launcher, pids, is_alive):
    executor = launcher.start()
    done = threading.Event()

    def end(error):
        executor.shutdown()
        done.set()

    executor.register_failure_callback(end)
    workers = pids(executor)
    os.kill(workers[0], signal.SIGKILL)
    assert done.wait(30)
    assert not any(map(is_alive, workers))


def test_a_failure_callback_that_takes_its_time_holds_nobody_up(
    launcher, pids, eventually, stopwatch
):
    executor = launcher.start()
    entered, release = threading.Event(), threading.Event()

    def block(error):
        entered.set()
        release.wait(60)

    executor.register_failure_callback(block)
    os.kill(pids(executor)[0], signal.SIGKILL)
    assert entered.wait(30)
    with stopwatch() as clock:
        executor.shutdown(timeout=60)
    assert clock.seconds < 5
    assert not release.is_set()
    release.set()


def test_a_shutdown_from_a_futures_callback_works(launcher, pids, is_alive):
    executor = launcher.start()
    workers = pids(executor)
    done = threading.Event()

    def end(_):
        executor.shutdown(3)
        done.set()

    executor.collective_rpc("supported_tasks", non_block=True).add_done_callback(end)
    assert done.wait(30)
    assert not any(map(is_alive, workers))


def test_exit_codes_of_an_orderly_end_that_was_none_are_told(launcher, caplog):
    executor = launcher.start()
    executor.collective_rpc(lambda worker: setattr(worker, "shutdown", lambda: os._exit(9)))
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        executor.shutdown()
    assert caplog.text.count("exited with code 9") == 2


# Collection, and the interpreter's end.


def test_an_executor_that_nobody_holds_is_collected_and_its_workers_end(
    launcher, pids, is_alive, eventually
):
    executor_class, *parts = launcher.prepare()
    executor = executor_class.start(*parts)
    workers = pids(executor)
    nursery = psutil.Process(workers[0]).ppid()
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    eventually(lambda: not any(map(is_alive, [*workers, nursery])))


@pytest.mark.parametrize("what", ["exit", "raise"])
@pytest.mark.parametrize("start", START)
def test_a_driver_that_ends_without_shutdown_leaves_nothing(drivers, what, start):
    driver = drivers(what, f"plugins.mp.start={start}")
    for _ in range(3):
        driver.line()
    code, error = driver.ended()
    assert code == {"exit": 5, "raise": 1}[what]
    assert ("ValueError: the user's own" in error) == (what == "raise")
    assert "Exception ignored" not in error
    assert driver.family() == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_of_the_driver_ends_nothing(launcher, pids):
    executor = launcher.start()
    workers = pids(executor)
    pid = os.fork()
    if pid == 0:
        try:
            executor.shutdown()
            executor._finalizer()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pids(executor) == workers


# Cycles.


def cycles(launcher, count, **overrides):
    """Start and stop ``count`` times; return the growth of (descriptors, bytes) after the first
    few.
    """
    process = psutil.Process()

    def once(index):
        executor = launcher.start(**overrides)
        executor.collective_rpc("supported_tasks")
        executor.collective_rpc("supported_tasks", non_block=True).result(60)
        if index % 5 == 4:
            os.kill(executor.collective_rpc(lambda worker: os.getpid())[0], signal.SIGKILL)
        executor.shutdown()
        launcher.started.clear()
        del executor
        gc.collect()

    for index in range(10):
        once(index)
    before = process.num_fds(), process.memory_info().rss
    for index in range(count - 10):
        once(index)
    after = process.num_fds(), process.memory_info().rss
    return [new - old for new, old in zip(after, before, strict=True)]


def test_twenty_cycles_leak_nothing(launcher):
    children = set(psutil.Process().children(recursive=True))
    threads = threading.active_count()
    descriptors, memory = cycles(launcher, 20)
    assert descriptors == 0
    assert memory < 4 << 20
    assert threading.active_count() == threads
    assert set(psutil.Process().children(recursive=True)) == children


@pytest.mark.slow
@pytest.mark.parametrize("start", START)
def test_two_hundred_cycles_leak_nothing(launcher, start):
    descriptors, memory = cycles(launcher, 200, **{"plugins.mp.start": start})
    assert descriptors == 0
    assert memory < 4 << 20
