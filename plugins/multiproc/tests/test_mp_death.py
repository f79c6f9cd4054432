"""What ends and what follows: worker, driver, nursery (cases B3, B5, B24; rows E3, X14; V1, V9)."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from hardpoint.errors import ExecutorFailedError, WorkerDiedError

START = ["nursery", "plain"]


def sleep(worker, seconds):
    time.sleep(seconds)


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_fails_pending_calls_health_and_tells_once(
    launcher, pids, stopwatch, start, rank
):
    executor = launcher.start(**{"plugins.mp.start": start})
    workers = pids(executor)
    heard, told = [], threading.Event()
    executor.register_failure_callback(heard.append)
    executor.register_failure_callback(lambda _: told.set())
    futures = [executor.collective_rpc(sleep, args=(1000,), non_block=True) for _ in range(3)]
    with stopwatch() as clock:
        os.kill(workers[rank], signal.SIGKILL)
        errors = [future.exception(30) for future in futures]
        assert told.wait(30)
    error = errors[0]
    assert isinstance(error, WorkerDiedError)
    assert errors == [error] * 3
    assert (error.rank, error.pid, error.exit) == (rank, workers[rank], -signal.SIGKILL)
    assert f"worker rank {rank} (pid {workers[rank]}) ended by signal 9" in str(error)
    assert clock.seconds < 1.0
    with pytest.raises(ExecutorFailedError) as caught:
        executor.check_health()
    assert caught.value.__cause__ is error
    assert heard == [error]
    with pytest.raises(ExecutorFailedError, match=r"the executor has failed: worker rank"):
        executor.collective_rpc("supported_tasks")


def test_a_blocking_call_ends_with_its_worker(launcher, pids):
    executor = launcher.start()
    victim = pids(executor)[1]
    threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(WorkerDiedError):
        executor.collective_rpc(sleep, args=(1000,), timeout=30)


def leave(worker, code):
    for number in range(20_000):  # more than is read by the time that the end is noticed
        print(f"line {number} of many")
    print("now")
    os._exit(code)


def test_an_exit_is_told_with_its_code_and_the_last_lines(launcher, capfd):
    executor = launcher.start()
    with pytest.raises(WorkerDiedError) as caught:
        executor.collective_rpc(leave, args=(7,))
    assert capfd.readouterr().err.count("line 7 of many") == 2
    assert caught.value.exit == 7
    assert caught.value.last_lines[-2:] == ("line 19999 of many", "now")
    assert len(caught.value.last_lines) == 20
    assert "exited with code 7\n" in str(caught.value)


def become(worker, rank):
    if worker.context.rank == rank:
        os.execv("/bin/sleep", ["sleep", "1000"])


@pytest.mark.parametrize("start", START)
def test_a_worker_that_becomes_another_program_is_one_that_died(launcher, pids, start):
    """Its process lives on, and is ended; nobody waits until it has been silent for long."""
    executor = launcher.start(**{"plugins.mp.start": start})
    victim = psutil.Process(pids(executor)[1])
    error = executor.collective_rpc(become, args=(1,), non_block=True).exception(50)
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.pid, error.exit) == (1, victim.pid, None)
    assert "as after `exec`" in str(error.__cause__)
    victim.wait(50)


def crash(worker):
    import ctypes

    ctypes.string_at(0)


def test_a_crash_in_native_code_shows_where(launcher):
    executor = launcher.start(workers=1)
    with pytest.raises(WorkerDiedError) as caught:
        executor.collective_rpc(crash)
    assert caught.value.exit == -signal.SIGSEGV
    assert any("in crash" in line for line in caught.value.last_lines)


def test_the_others_are_gone_after_the_shutdown_that_follows(launcher, pids, is_alive, stopwatch):
    executor = launcher.start(workers=3)
    workers = pids(executor)
    os.kill(workers[1], signal.SIGKILL)
    with stopwatch() as clock:
        executor.shutdown()
    assert clock.seconds < 5
    assert [pid for pid in workers if is_alive(pid)] == []


# The driver.


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("what", ["idle", "busy", "native", "deaf", "children", "forked"])
def test_a_killed_driver_leaves_nothing(drivers, eventually, stopwatch, start, what):
    driver = drivers(what, f"plugins.mp.start={start}")
    driver.line(), driver.line(), driver.line()
    for _ in range({"idle": 0, "native": 2}.get(what, 1)):
        driver.line()
    assert len(driver.family()) >= 4
    forked = [pid for pid in driver.family() if what == "forked" and _is_copy(driver, pid)]
    with stopwatch() as clock:
        driver.kill()
        eventually(lambda: set(driver.family()) <= set(forked))
    assert clock.seconds < 2
    for pid in forked:
        psutil.Process(pid).kill()


def _is_copy(driver, pid):
    process = psutil.Process(pid)
    return process.ppid() == driver.process.pid and "mp_driver.py" in " ".join(process.cmdline())


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("after", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5])
def test_a_driver_killed_while_it_starts_leaves_nothing(
    drivers, eventually, stopwatch, start, after
):
    driver = drivers("idle", f"plugins.mp.start={start}", "plugins.dummy.load_seconds=2")
    driver.line(), driver.line()
    time.sleep(after)  # a moment of the start, not a synchronisation
    with stopwatch() as clock:
        driver.kill()
        eventually(lambda: driver.family() == [])
    assert clock.seconds < 5


def named_memory(pids):
    """What of shared memory with a name these processes have open or mapped. Names that are in
    /dev/shm without them are other programs'.
    """
    found = set()
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        held = [line.partition("/")[2] for line in (folder / "maps").read_text().splitlines()]
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                held.append(str(link.readlink())[1:])
        found |= {path for path in held if path.startswith("dev/shm/")}
    return found


def test_named_memory_is_seen():
    here = [os.getpid()]
    others = named_memory(here)  # of libraries that earlier tests of this process have loaded
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="hp-test-") as file:
        assert named_memory(here) - others == {file.name[1:]}
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            file.close()
            found = named_memory(here) - others
            assert {name.split()[0] for name in found} == {file.name[1:]}
    assert named_memory(here) - others == set()


def test_no_memory_and_no_socket_has_a_name(drivers, tmp_path):
    driver = drivers("busy", TMPDIR=str(tmp_path))
    for _ in range(4):
        said = driver.line()
    family = driver.family()
    assert named_memory(family) == set()
    assert list(tmp_path.iterdir()) == []
    for pid in family:
        for connection in psutil.Process(pid).net_connections(kind="all"):
            assert not (isinstance(connection.laddr, str) and connection.laddr), (said, connection)
            assert connection.status != psutil.CONN_LISTEN
    driver.kill()


# The nursery.


@pytest.mark.parametrize("start", START)
def test_a_dead_nursery_means_dead_workers(launcher, pids, is_alive, eventually, stopwatch, start):
    executor = launcher.start(**{"plugins.mp.start": start})
    workers = pids(executor)
    child = executor.collective_rpc(child_of)[0]
    nursery = psutil.Process(workers[0]).ppid()
    future = executor.collective_rpc(sleep, args=(1000,), non_block=True)
    with stopwatch() as clock:
        os.kill(nursery, signal.SIGKILL)
        error = future.exception(30)
    assert clock.seconds < 1.0
    assert isinstance(error, ExecutorFailedError)
    eventually(lambda: not any(map(is_alive, [*workers, child])))
    executor.shutdown()


def child_of(worker):
    import subprocess

    return subprocess.Popen(["sleep", "1000"]).pid


def test_a_stopped_nursery_hinders_neither_death_nor_shutdown(launcher, stop, pids, is_alive):
    executor = launcher.start()
    workers = pids(executor)
    nursery = psutil.Process(workers[0]).ppid()
    stop(nursery)
    future = executor.collective_rpc(sleep, args=(1000,), non_block=True)
    os.kill(workers[0], signal.SIGKILL)
    error = future.exception(30)
    assert isinstance(error, WorkerDiedError)
    assert error.pid == workers[0]
    executor.shutdown(timeout=3)
    assert not any(map(is_alive, [*workers, nursery]))


def test_what_a_worker_started_ends_with_it(launcher, pids, is_alive, eventually):
    executor = launcher.start()
    children = executor.collective_rpc(child_of)
    os.kill(pids(executor)[0], signal.SIGKILL)
    eventually(lambda: not is_alive(children[0]))
    executor.shutdown()
    assert not is_alive(children[1])


def test_only_our_processes_are_signalled(launcher, pids):
    """A process of the user's, in the driver's own group, outlives everything."""
    import subprocess

    bystander = subprocess.Popen(["sleep", "1000"])
    executor = launcher.start()
    os.kill(pids(executor)[0], signal.SIGKILL)
    executor.shutdown()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_ten_crashes_leave_room_for_an_eleventh(drivers, eventually):
    """Case B5: what one run takes has no name, so it ends with the last process that holds it."""
    for _ in range(10):
        driver = drivers("idle")
        driver.line(), driver.line(), driver.line()
        assert named_memory(driver.family()) == set()
        driver.kill()
        eventually(lambda driver=driver: driver.family() == [])
    driver = drivers("shutdown")
    assert [list(driver.line()) for _ in range(4)][-1] == ["closed"]
