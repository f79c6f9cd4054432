"""Executors of the dummy platform, followers and drivers in processes of their own, and a look from
outside.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import cloudpickle
import psutil
import pytest
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform

PATIENCE = 30.0
"""Seconds after which a wait is a failure; nothing here takes as long, were the machine idle."""

MARK = "MP_TEST_MARK"


def pytest_collection_modifyitems(items):
    """Send functions of the tests by value: workers need not import pytest to run them."""
    for module in {item.module for item in items if item.path.parent == Path(__file__).parent}:
        cloudpickle.register_pickle_by_value(module)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def wait_until(condition, within=PATIENCE):
    end = time.monotonic() + within
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError("it never came true")
        time.sleep(0.002)
    return found


@pytest.fixture
def eventually():
    return wait_until


class Stopwatch:
    """Seconds as this process lives them: of a thread that sleeps for a moment again and again,
    how often it awoke. Where every process waits for a processor they are longer than the wall's,
    so a bound in them holds the code to its word, and not the machine.
    """

    MOMENT = 0.01

    def __enter__(self):
        self.seconds, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()
        return self

    def _count(self):
        while not self._ended.wait(self.MOMENT):
            self.seconds += self.MOMENT

    def __exit__(self, *exception):
        self._ended.set()
        self._thread.join()


@pytest.fixture
def stopwatch():
    return Stopwatch


class Launcher:
    """Starts executors ``mp`` on the dummy platform, in this process; ends them after the test."""

    def __init__(self):
        self.started = []

    @staticmethod
    def configured(workers=2, **overrides):
        """Return the configuration as it was given."""
        keys = {
            "model": "dummy",
            "load_format": "dummy",
            "platform": "dummy",
            "executor": "mp",
            "plugins.dummy.num_workers": workers,
            **overrides,
        }
        return load_config(overrides=keys, environ={})

    def prepare(self, **overrides):
        """Return what an executor is built from: (class, config, registry, platform)."""
        config = self.configured(**overrides)
        registry = Registry.discover(config)
        platform = select_platform(registry, config)
        config = evolve(config, description=read_description("dummy", "dummy"))
        config = resolution.configure(config, registry, platform)
        config = resolution.fill_defaults(config, platform)
        executor_class = select_executor(registry, config, platform)
        config = resolution.structure_plugins(config, registry)
        resolution.check(config, registry, platform, executor_class)
        return executor_class, config, registry, platform

    def built(self, **overrides):
        """Return an executor that was not started; its platform can still be changed."""
        executor_class, *parts = self.prepare(**overrides)
        executor = executor_class(*parts)
        self.started.append(executor)
        return executor

    def start(self, **overrides):
        executor_class, *parts = self.prepare(**overrides)
        executor = executor_class.start(*parts)
        self.started.append(executor)
        return executor

    def close(self):
        for executor in self.started:
            executor.shutdown()


@pytest.fixture
def launcher():
    made = Launcher()
    yield made
    made.close()


def pid_of(worker):
    return os.getpid()


@pytest.fixture
def pids():
    """Ask an executor for its workers' processes."""
    return lambda executor: executor.collective_rpc(pid_of)


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def is_alive():
    return alive


@pytest.fixture
def stop():
    """Stop a process, and wait until all its threads stand still."""

    def stop(pid):
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    return stop


class Driver:
    """A driver in a process of its own, whose descendants are found by a mark in their environment.

    ``said`` are the JSON lines that it printed so far.
    """

    def __init__(self, script, mark, *arguments, cwd=None, **environment):
        self.mark = mark
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, MARK: mark, **environment},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def line(self):
        """Return the next line that it prints, read as JSON."""
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the driver ended: {self.process.stderr.read()}")
        return json.loads(line)

    def family(self):
        """Return all living processes of this driver, itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(MARK) == self.mark:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ended(self, within=PATIENCE):
        """Wait for its end; return its exit code and what it wrote to standard error."""
        _, error = self.process.communicate(timeout=within)
        return self.process.returncode, error

    def kill(self, signum=signal.SIGKILL):
        self.process.send_signal(signum)


@pytest.fixture
def drivers():
    """Start drivers; what is left of them after the test is killed, and was to be none."""
    made = []

    def start(*arguments, script=None, **environment):
        script = script or Path(__file__).with_name("mp_driver.py")
        driver = Driver(script, uuid.uuid4().hex, *arguments, **environment)
        made.append(driver)
        return driver

    yield start
    left = []
    for driver in made:
        if driver.process.poll() is None:
            driver.kill()
            driver.process.wait()
        for stream in (driver.process.stdout, driver.process.stderr):
            stream.close()
        for _ in range(200):
            if not driver.family():
                break
            time.sleep(0.02)
        for pid in driver.family():
            left.append(psutil.Process(pid).cmdline())
            psutil.Process(pid).kill()
    assert left == []


class Cluster:
    """A leader's settings, and the followers that join it; each has an address of this machine."""

    host, other = "127.0.0.2", "127.0.0.3"
    command = "import sys; from hardpoint.cli import main; sys.exit(main(sys.argv[1:]))"

    def __init__(self, folder):
        self.key_file = folder / "key"
        self.leader = f"{self.host}:{self._free_port()}"
        self.followers = []
        self.log = folder

    def _free_port(self):
        with socket.socket() as probe:
            probe.bind((self.host, 0))
            return probe.getsockname()[1]

    def keys(self, nodes=2, **more):
        return {
            "nnodes": nodes,
            "plugins.mp.leader": self.leader,
            "plugins.mp.key_file": str(self.key_file),
            "plugins.mp.start_timeout": 120.0,
            "rpc.heartbeat": 0.2,
            **more,
        }

    def follow(self, *more, environ=None, address=other):
        command = [sys.executable, "-P", "-c", self.command, "worker", "--join", self.leader,
                   "--key-file", str(self.key_file), "--address", address,
                   "--wait", "60", *more]  # fmt: skip
        error = (self.log / f"follower{len(self.followers)}").open("w+")
        process = subprocess.Popen(
            command, stderr=error, stdout=error, env={**os.environ, **(environ or {})}
        )
        process.log = error
        self.followers.append(process)
        return process

    def said(self, process):
        process.log.flush()
        return Path(process.log.name).read_text()

    def close(self):
        for process in self.followers:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.log.close()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def family():
    """Return a process and all below it."""

    def family(pid):
        try:
            process = psutil.Process(pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    return family
