"""A driver that is killed leaves no worker and nothing of the Ray that it started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

MARK = "RAY_TEST_MARK"


class Driver:
    """A driver in a process of its own, whose family is found by a mark in its environment."""

    def __init__(self, folder, *arguments):
        self.mark = uuid.uuid4().hex
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("ray_driver.py")), *arguments],
                env={**os.environ, MARK: self.mark, "TMPDIR": str(folder)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def line(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise EOFError("the driver ended")

    def _found(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    found.append((process.pid, process.name()))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def family(self):
        return [pid for pid, _ in self._found()]

    def named(self, name):
        return [pid for pid, its in self._found() if its == name]


@pytest.fixture
def drivers(eventually):
    made = []

    def start(*arguments):
        made.append(Driver(*arguments))
        return made[-1]

    yield start
    for driver in made:
        if driver.process.poll() is None:
            driver.process.kill()
        driver.process.wait()
        driver.process.stdout.close()
        eventually(lambda driver=driver: driver.family() == [])


def folders():
    return set(Path("/tmp").glob("hp-ray-*"))


def shared_by(pids):
    """Return the files in /dev/shm that are named after one of these processes: others' come and
    go meanwhile.
    """
    named = re.compile(rf"(?<!\d)({'|'.join(map(str, pids))})(?!\d)")
    return [path for path in Path("/dev/shm").iterdir() if named.search(path.name)]


@pytest.mark.parametrize(
    ("executor", "when"),
    [
        ("ray", "running"),
        pytest.param("ray", "starting", marks=pytest.mark.slow),
        pytest.param("ray_legacy", "running", marks=pytest.mark.slow),
    ],
)
def test_a_killed_driver_leaves_nothing(drivers, tmp_path, eventually, is_alive, executor, when):
    before = folders()
    driver = drivers(tmp_path, f"executor={executor}")
    driver.line()
    workers = []
    if when == "running":
        workers = driver.line()["workers"]
    else:
        eventually(lambda: folders() - before)
    family = driver.family()
    own = {path for path in folders() - before if whose(path, family)}
    assert own or when == "starting"
    assert bool(shared_by(family)) == (executor == "ray_legacy")
    driver.process.kill()
    eventually(lambda: driver.family() == [])
    eventually(lambda: not (own & folders()))
    eventually(lambda: not any(map(is_alive, workers)))
    eventually(lambda: shared_by(family) == [])


@pytest.mark.slow
def test_a_driver_that_is_to_end_says_nothing_and_leaves_nothing(drivers, tmp_path, eventually):
    """Ray has a handler of its own for SIGTERM, which prints where the program was."""
    driver = drivers(tmp_path)
    driver.line()
    driver.line()
    driver.process.terminate()
    assert driver.process.wait(60) == -signal.SIGTERM
    assert not [line for line in driver.errors.read_text().splitlines() if line[:7] != "waiting"]
    eventually(lambda: driver.family() == [])


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["ray", "ray_legacy"])
def test_a_shutdown_ends_though_the_head_of_ray_is_gone(drivers, tmp_path, eventually, executor):
    """Ray's own calls wait for it for a minute, and end the program then."""
    driver = drivers(tmp_path, f"executor={executor}")
    driver.line()
    workers = driver.line()["workers"]
    (head,) = driver.named("gcs_server")
    os.kill(head, signal.SIGKILL)
    os.kill(workers[1], signal.SIGKILL)
    assert driver.line()["failed"] == "WorkerDiedError"
    closed = driver.line()
    assert closed["closed"]
    assert closed["seconds"] < 45  # of a minute
    assert driver.process.wait(60) == 0
    eventually(lambda: driver.family() == [])


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["ray", "ray_legacy"])
def test_when_the_driver_s_own_node_is_killed_it_is_told_and_nothing_is_left(
    drivers, tmp_path, eventually, executor
):
    """The node of rank 0: with Ray's process there, all of its workers end. Ray itself would tell
    so a quarter of a minute later, in other words.
    """
    driver = drivers(tmp_path, f"executor={executor}")
    driver.line()
    workers = driver.line()["workers"]
    raylet, *_ = driver.named("raylet")  # others are what it is just starting
    family = driver.family()
    os.kill(raylet, signal.SIGKILL)
    told = driver.line()
    assert told["failed"] == "WorkerDiedError"
    assert told["pid"] == workers[told["rank"]]
    assert f"the raylet (pid {raylet}), ended" in told["text"]
    assert driver.line()["closed"]
    assert driver.process.wait(60) == 0
    eventually(lambda: driver.family() == [])
    eventually(lambda: shared_by(family) == [])


def whose(folder, pids):
    """Whether one of these processes names a folder in its command."""
    for pid in pids:
        try:
            if str(folder) in " ".join(psutil.Process(pid).cmdline()):
                return True
        except psutil.Error:
            continue
    return False
