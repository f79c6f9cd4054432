"""What a start meets that is none of its doing: a nursery that stands still, an interpreter that is
not there, limits, a folder that is gone (cases B1, B23; safety S7).
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hardpoint.errors import ExecutorFailedError, StartTimeoutError
from hardpoint_multiproc import descriptors, nursery_process, worker_entry
from hardpoint_multiproc.nursery_process import NurseryProcess

START = ["nursery", "plain"]
IMPATIENT = {"plugins.mp.start_timeout": 1.0, "rpc.heartbeat": 0.05}


@pytest.fixture
def importing(tmp_path, monkeypatch):
    """Make a module whose import does ``what``, for a nursery to preload."""

    def make(what):
        (tmp_path / "hp_preloaded.py").write_text(what)
        monkeypatch.syspath_prepend(str(tmp_path))
        return ("hp_preloaded",)

    return make


@pytest.fixture
def nothing_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) == before


def test_a_nursery_that_hangs_in_an_import_ends_the_start(launcher, importing, nothing_left):
    executor = launcher.built(**IMPATIENT)
    executor.platform.preload = importing("import time; time.sleep(1000)")
    began = time.monotonic()
    with pytest.raises(StartTimeoutError, match="rank 0: waiting for the nursery") as caught:
        executor.start_workers()
    assert set(caught.value.stages) == {0, 1}
    executor.shutdown()
    assert time.monotonic() - began < 20


def test_a_nursery_that_is_long_at_an_import_and_works_is_waited_for(launcher, importing):
    executor = launcher.built(**IMPATIENT)
    executor.platform.preload = importing(
        "import time; end = time.monotonic() + 2.5\nwhile time.monotonic() < end: pass"
    )
    executor.start_workers()
    assert len(executor.check_health()) == 2


def test_a_driver_that_stood_still_does_not_blame_the_nursery(monkeypatch):
    prepared, moment, waits = NurseryProcess(None), [0.0], []

    def wait(seconds):
        waits.append(seconds)
        moment[0] += 1000.0 if len(waits) == 2 else seconds  # stopped by Ctrl-Z, and continued
        if len(waits) < 4:
            raise TimeoutError
        return ""

    monkeypatch.setattr(prepared.ready, "result", wait)
    monkeypatch.setattr(nursery_process, "time", SimpleNamespace(monotonic=lambda: moment[0]))
    try:
        assert prepared.wait_ready(10.0) == ""
    finally:
        monkeypatch.undo()
        prepared.close()


def test_a_nursery_that_is_stopped_before_it_forks_ends_the_start(launcher, stop, nothing_left):
    executor_class, config, registry, platform = launcher.prepare(**IMPATIENT)
    prepared = executor_class.prepare(config, registry, platform)
    prepared.ready.result(30)
    stop(prepared.pid)
    began = time.monotonic()
    with pytest.raises(StartTimeoutError, match="rank 1: not started"):
        executor_class.start(config, registry, platform, prepared)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize(
    ("executable", "facts"),
    [("/absent/python", "'/absent/python'.*No such file"), ("/bin/false", "exited with code 1")],
)
def test_an_interpreter_that_cannot_be_one_is_named(
    launcher, monkeypatch, nothing_left, start, executable, facts
):
    monkeypatch.setattr(sys, "executable", executable)
    for _ in range(3):  # how far the other side has come differs
        with pytest.raises(ExecutorFailedError, match=facts):
            launcher.start(**{"plugins.mp.start": start})


@pytest.mark.parametrize("room", [2, 6, 14, 24])
def test_a_limit_of_open_files_is_named_with_its_value(launcher, room, nothing_left):
    process, (soft, hard) = psutil.Process(), resource.getrlimit(resource.RLIMIT_NOFILE)
    parts = launcher.prepare()
    used = process.num_fds()
    taken = {int(each.name) for each in Path("/proc/self/fd").iterdir()}
    limit = [fd for fd in range(max(taken) + room + 2) if fd not in taken][room]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(ExecutorFailedError, match=rf"open files.*ulimit -n.* {limit}"):
            parts[0].start(*parts[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.num_fds() == used


def place(worker):
    from pathlib import Path

    return str(Path("/proc/self/cwd").readlink())


@pytest.mark.parametrize("start", START)
def test_workers_start_in_a_folder_that_is_gone(launcher, tmp_path, monkeypatch, start):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        executor = launcher.start(**{"plugins.mp.start": start})
        assert executor.collective_rpc(place) == [f"{folder} (deleted)"] * 2
    finally:
        os.chdir(tmp_path)


def test_a_folder_that_one_is_in_already_is_not_entered_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    worker_entry.enter(str(other))
    assert Path.cwd() == other
    monkeypatch.setattr(os, "chdir", lambda folder: pytest.fail("it may not be let in again"))
    worker_entry.enter(str(other))
    worker_entry.enter("")


def test_a_message_whose_descriptors_are_too_many_comes_without_them():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        descriptors.send(ours, {"op": "started"}, [0, 1, 2])
        used = {int(each.name) for each in Path("/proc/self/fd").iterdir()}
        free = [fd for fd in range(max(used) + 3) if fd not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[1], hard))
        try:
            got = descriptors.receive(theirs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert got == ({"op": "started", "refused": "Too many open files"}, [])
        assert {int(each.name) for each in Path("/proc/self/fd").iterdir()} <= used


# The nursery stands still later on.


def child_of_worker(worker):
    import subprocess

    return subprocess.Popen(["sleep", "1000"]).pid


@pytest.mark.parametrize("killed", [False, True], ids=["running", "one killed"])
def test_a_stopped_nursery_delays_no_shutdown_and_leaves_nothing(
    launcher, pids, stop, is_alive, eventually, killed
):
    executor = launcher.start()
    workers = pids(executor)
    children = executor.collective_rpc(child_of_worker)
    stop(psutil.Process(workers[0]).ppid())
    if killed:
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: executor.failure)
    began = time.monotonic()
    executor.shutdown(timeout=30)
    assert time.monotonic() - began < 10
    eventually(lambda: not any(map(is_alive, [*workers, *children])))


def test_a_worker_that_left_its_group_ends_with_the_driver(drivers, eventually):
    driver = drivers("moved")
    for _ in range(4):
        driver.line()
    driver.kill()
    driver.ended()
    eventually(lambda: driver.family() == [], 10)


# Calls that fork.


def fork_and_return(worker):
    child = os.fork()
    return os.waitpid(child, 0)[1] if child else "the child's"


def fork_and_exit(worker):
    child = os.fork()
    return os.waitpid(child, 0)[1] if child else sys.exit(0)


@pytest.mark.parametrize("function", [fork_and_return, fork_and_exit])
def test_a_forked_child_that_comes_back_from_its_call_is_no_second_worker(
    launcher, pids, function, capfd
):
    executor = launcher.start()
    workers = pids(executor)
    assert executor.collective_rpc(function, timeout=30) == [1 << 8] * 2
    assert [pids(executor) for _ in range(5)] == [workers] * 5
    executor.shutdown()
    assert capfd.readouterr().err.count("forked by a call") == 2
