"""A worker that was given up and goes on: it is never heard, does nothing more, and ends (V3)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fault_groups import PATIENCE, SIZE, settle, step
from hardpoint.errors import WorkerDiedError, WorkerSilentError

CHANNELS = ["shared_memory", "zmq"]


def pid_of(worker):
    return os.getpid()


def answer(worker, number):
    return number, worker.rank, os.getpid()


def hold(worker, folder, seconds=60.0):
    """Be busy until the file ``open`` is there."""
    folder = Path(folder)
    (folder / f"entered-{worker.rank}").touch()
    end = time.monotonic() + seconds
    while not (folder / "open").exists() and time.monotonic() < end:
        time.sleep(0.002)
    (folder / f"left-{worker.rank}").touch()


def mark(worker, folder):
    Path(folder, f"ran-{worker.rank}").touch()


def count(worker, folder):
    """Be busy for ever, and leave a trace of it."""
    with Path(folder, f"count-{worker.rank}").open("ab", buffering=0) as file:
        while True:
            file.write(b".")
            time.sleep(0.001)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    settle(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def answers_for_itself(executor):
    pids = executor.collective_rpc(pid_of)
    for number in range(100):
        expected = [(number, rank, pid) for rank, pid in enumerate(pids)]
        assert executor.collective_rpc(answer, args=(number,), timeout=PATIENCE) == expected
    assert executor.calls.late_replies == 0
    assert executor.failure is None


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_worker_of_a_failed_group_that_goes_on_beside_its_successor(groups, tmp_path, channel):
    """Rank 2 is stopped in a call, with others behind it, when rank 0 dies."""
    keys = {"plugins.mp.channel": channel, "plugins.dummy.silent_after": 60.0}
    old = groups.ready(**keys)
    pids = old.collective_rpc(pid_of)
    held = [old.collective_rpc(hold, args=(str(tmp_path),), non_block=True)]
    held.append(old.collective_rpc(mark, args=(str(tmp_path),), non_block=True))
    held.append(step(old, 1, non_block=True))
    settle(lambda: len(list(tmp_path.glob("entered-*"))) == SIZE)
    stop(pids[2])
    os.kill(pids[0], signal.SIGKILL)
    assert [type(future.exception(PATIENCE)) for future in held] == [WorkerDiedError] * 3

    new = groups.ready(**keys)
    os.kill(pids[2], signal.SIGCONT)
    (tmp_path / "open").touch()
    settle((tmp_path / "left-2").exists)  # it does go on, and comes to its next call
    answers_for_itself(new)
    assert step(new, 1).step_id == 1
    assert [type(future.exception(0)) for future in held] == [WorkerDiedError] * 3
    old.shutdown()
    assert all(map(gone, pids))
    assert not list(tmp_path.glob("ran-*")), "what was given up is not begun"
    answers_for_itself(new)


def test_stopped_workers_of_a_killed_driver_end_and_disturb_no_successor(groups, drivers):
    """They and their nursery are stopped when their driver is killed. The kernel continues such
    orphans by itself, where it knows them as such.
    """
    driver = drivers.start()
    pids = driver.until("idle")
    nursery = psutil.Process(pids[0]).ppid()
    for pid in (*pids, nursery):
        stop(pid)
    driver.signal(signal.SIGKILL)
    driver.ended()
    new = groups.ready()
    answers_for_itself(new)
    for pid in (*pids, nursery):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    settle(lambda: all(map(gone, (*pids, nursery))))
    answers_for_itself(new)


def test_a_silent_worker_is_continued_for_its_stack_and_for_nothing_else(groups, tmp_path):
    old = groups.ready(**{"plugins.dummy.silent_after": 0.5})
    victim = old.collective_rpc(pid_of)[1]
    trace = tmp_path / "count-1"
    future = old.collective_rpc(count, args=(str(tmp_path),), non_block=True)
    settle(lambda: trace.exists() and trace.stat().st_size)
    stop(victim)
    done = trace.stat().st_size
    error = future.exception(PATIENCE)
    assert isinstance(error, WorkerSilentError)
    assert error.rank == 1
    assert "in count" in error.stack
    settle(lambda: gone(victim))
    assert trace.stat().st_size == done
    answers_for_itself(groups.ready())
