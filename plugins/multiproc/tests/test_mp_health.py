"""Who is alive, who is busy, who hangs: the control lane (cases B12, B13, B24; rows X13; V2)."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from hardpoint.errors import (
    ExecutorFailedError,
    WorkerDiedError,
    WorkerHungError,
    WorkerSilentError,
)
from hardpoint_multiproc.signals import LAST_STACK_SIGNAL

BEAT = {"rpc.heartbeat": 0.05}


def sleep(worker, seconds):
    time.sleep(seconds)
    return worker.rank


def echo(worker, value):
    return value


def hold_the_interpreter(worker, count):
    """Work in native code that lets no other thread run."""
    sum(range(count))
    return worker.rank


def impatient(launcher, silent_after=1.0, **overrides):
    executor = launcher.built(**BEAT, **overrides)
    executor.platform.silent_after = silent_after
    executor.start_workers()
    return executor


def test_a_stopped_worker_is_unhealthy_within_the_callers_bound_and_heals(
    launcher, stop, pids, stopwatch
):
    executor = launcher.start(**BEAT)
    victim = pids(executor)[1]
    assert [each.rank for each in executor.check_health(30)] == [0, 1]
    stop(victim)
    with (
        stopwatch() as clock,
        pytest.raises(WorkerSilentError, match=rf"rank 1 \(pid {victim}\) was not heard") as caught,
    ):
        executor.check_health(0.3)
    assert clock.seconds < 2
    assert caught.value.rank == 1
    os.kill(victim, signal.SIGCONT)
    assert [each.rank for each in executor.check_health(30)] == [0, 1]
    assert executor.collective_rpc(sleep, args=(0,)) == [0, 1]


def test_a_stopped_worker_fails_the_executor_with_its_stack(
    launcher, stop, pids, is_alive, eventually, stopwatch
):
    executor = impatient(launcher)
    workers = pids(executor)
    future = executor.collective_rpc(sleep, args=(1000,), non_block=True)
    eventually(lambda: all(each.busy_since for each in executor.check_health()))
    stop(workers[0])
    began = time.monotonic()
    with stopwatch() as clock:
        error = future.exception(30)
    took = time.monotonic() - began
    assert isinstance(error, WorkerSilentError)
    assert (error.rank, error.pid) == (0, workers[0])
    assert "in sleep" in error.stack
    assert took >= 0.4
    assert clock.seconds < 6
    eventually(lambda: not is_alive(workers[0]))
    with pytest.raises(ExecutorFailedError):
        executor.check_health()


def test_native_code_may_hold_the_interpreter_for_as_long_as_the_platform_says(launcher):
    executor = impatient(launcher, silent_after=30.0)
    assert executor.collective_rpc(hold_the_interpreter, args=(4 * 10**7,), timeout=30) == [0, 1]
    assert len(executor.check_health(30)) == 2


def test_native_code_that_holds_it_for_longer_is_told_with_the_stack(launcher):
    executor = impatient(launcher)
    with pytest.raises(WorkerSilentError) as caught:
        executor.collective_rpc(hold_the_interpreter, args=(10**14,))
    assert "in hold_the_interpreter" in caught.value.stack


def test_a_busy_worker_that_beats_is_told_of_once_and_nothing_else(launcher, caplog, eventually):
    executor = launcher.start(**BEAT, **{"plugins.mp.warn_after": 0.2})
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        assert executor.collective_rpc(sleep, args=(0.8,)) == [0, 1]  # four times the interval
    told = [line for line in caplog.text.splitlines() if "has been busy with sleep" in line]
    assert len(told) == 2
    assert all("it still answers" in line for line in told)
    assert [each.busy_since for each in executor.check_health()] == [None, None]


def test_a_worker_may_be_given_up_where_that_is_configured(launcher, pids, is_alive, eventually):
    executor = launcher.start(**BEAT, **{"plugins.mp.hang_after": 0.5})
    workers = pids(executor)
    with pytest.raises(WorkerHungError, match="busy with 'sleep' for") as caught:
        executor.collective_rpc(sleep, args=(1000,))
    assert "in sleep" in caught.value.stack
    eventually(lambda: not is_alive(workers[caught.value.rank]))


def raise_on(worker, rank, seconds):
    if worker.rank == rank:
        raise ValueError("of one rank")
    time.sleep(seconds)


def test_an_error_of_one_rank_while_the_other_hangs_ends_the_group_with_that_error(
    launcher, pids, is_alive, eventually, stopwatch
):
    """Case B2."""
    executor = launcher.start(**BEAT)
    workers = pids(executor)
    with stopwatch() as clock:
        future = executor.collective_rpc(raise_on, args=(1, 1000), reply_rank=0, non_block=True)
        error = future.exception(30)
    assert clock.seconds < 2
    assert type(error.__cause__) is ValueError
    failure = eventually(lambda: executor.failure)
    assert failure.__cause__ is error
    assert "ranks [0] had not acknowledged the call" in str(failure)
    with pytest.raises(ExecutorFailedError):
        executor.check_health()
    eventually(lambda: not is_alive(workers[0]))


def test_an_error_that_all_acknowledge_in_time_harms_nobody(launcher):
    executor = launcher.start(**BEAT)
    for _ in range(3):
        with pytest.raises(Exception, match="of one rank"):
            executor.collective_rpc(raise_on, args=(0, 0.2))
    time.sleep(1.3)  # past the second that the others have
    assert executor.collective_rpc(sleep, args=(0,)) == [0, 1]


def test_death_and_silence_have_one_cause_the_first(launcher, stop, pids, eventually):
    executor = impatient(launcher)
    workers = pids(executor)
    heard = []
    executor.register_failure_callback(heard.append)
    os.kill(workers[0], signal.SIGKILL)
    stop(workers[1])
    eventually(lambda: heard)
    executor.shutdown()
    assert len(heard) == 1
    assert isinstance(heard[0], WorkerDiedError)
    assert heard[0].pid == workers[0]


def test_a_driver_that_stood_still_accuses_nobody(drivers, eventually):
    driver = drivers("idle", "rpc.heartbeat=0.05")
    for _ in range(3):
        said = driver.line()
    driver.kill(signal.SIGSTOP)
    time.sleep(1.0)
    driver.kill(signal.SIGCONT)
    time.sleep(0.5)
    assert set(said["workers"]) <= set(driver.family())
    driver.kill()


def test_an_idle_executor_takes_next_to_no_time(launcher, pids):
    """Case B12; the bound is half a percent of a core for everything together."""
    executor = launcher.start(workers=4)
    executor.collective_rpc("supported_tasks")
    workers = pids(executor)
    group = [os.getpid(), psutil.Process(workers[0]).ppid(), *workers]
    time.sleep(0.1)
    began, before = time.monotonic(), sum(map(time_of, group))
    time.sleep(4)
    used = sum(map(time_of, group)) - before
    assert 0 < used <= 0.005 * (time.monotonic() - began)
    took = []
    for _ in range(20):
        time.sleep(0.03)  # by which all sleep
        began = time.monotonic()
        executor.collective_rpc("supported_tasks")
        took.append(time.monotonic() - began)
    assert min(took) < 0.005  # others have the processors, too


def time_of(pid):
    """Return the seconds of processor time that all threads of a process have had, to the ns."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def test_memory_of_large_messages_is_given_back_by_every_side(launcher, eventually):
    executor = launcher.start(**BEAT)
    memories = executor._resources.end._memories

    def held():
        return sum(os.fstat(memory.fd).st_blocks for memory in memories) * 512

    data = os.urandom(8 << 20)
    answers = executor.collective_rpc(echo, args=(data,))
    assert held() >= 24 << 20  # what was sent, and both answers
    assert answers == [data, data]
    eventually(lambda: held() < 2 << 20)
    assert executor.collective_rpc(echo, args=(data,)) == [data, data]


@pytest.mark.parametrize("channel", ["shared_memory", "zmq"])
def test_an_array_of_30_mib_comes_back_equal(launcher, channel):
    """Row R9."""
    numpy = pytest.importorskip("numpy")
    executor = launcher.start(**{"plugins.mp.channel": channel})
    array = numpy.random.default_rng(5).integers(0, 1 << 60, (30, 1 << 17))
    assert array.nbytes == 30 << 20
    for back in executor.collective_rpc(echo, args=(array,)):
        assert back.dtype == array.dtype
        assert numpy.array_equal(back, array)
        assert not back.flags.writeable


def blocking_the_last_signal(worker):
    """Return of each thread of this process, the main one first, whether it blocks that signal."""
    bit = 1 << (LAST_STACK_SIGNAL - 1)
    threads = sorted(Path("/proc/self/task").iterdir(), key=lambda each: int(each.name))
    masks = [(each / "status").read_text().partition("SigBlk:\t")[2].split()[0] for each in threads]
    return [bool(int(mask, 16) & bit) for mask in masks]


@pytest.mark.parametrize("start", ["nursery", "plain"])
def test_the_signal_that_ends_a_stopped_worker_meets_the_thread_that_works(launcher, start):
    executor = launcher.start(**{"plugins.mp.start": start})
    for main, *others in executor.collective_rpc(blocking_the_last_signal):
        assert not main
        assert others
        assert all(others)


def test_a_thousand_calls_are_less_work_than_one_core_does_in_a_second(launcher, pids):
    """Row R8, counted in processor time, of which a loaded machine takes little more."""
    executor = launcher.start()
    family = [psutil.Process(), *map(psutil.Process, pids(executor))]

    def spent():
        return sum(sum(process.cpu_times()[:2]) for process in family)

    executor.collective_rpc("supported_tasks")
    before = spent()
    for _ in range(1000):
        executor.collective_rpc("supported_tasks")
    assert spent() - before < 1.0
