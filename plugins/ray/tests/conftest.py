"""Executors ``ray`` of the dummy platform, on one Ray for each module of tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
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
from hardpoint_conformance.subject import plans

PATIENCE = 60.0
"""Seconds after which a wait is a failure; nothing here takes as long, were the machine idle."""


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
        time.sleep(0.01)
    return found


@pytest.fixture
def eventually():
    return wait_until


@pytest.fixture(scope="module")
def session():
    """A Ray of this module's own, which its executors share."""
    from hardpoint_ray import session
    from hardpoint_ray.settings import RaySettings

    opened = session.connect(RaySettings(address="local"), {"CPU": 8, "dummy": 8})
    yield opened
    opened.close()


class Launcher:
    """Starts executors on the dummy platform, in this process; ends them after the test."""

    def __init__(self):
        self.started = []

    def prepare(self, workers=2, **overrides):
        """Return what an executor is built from: (class, config, registry, platform)."""
        keys = {
            "model": "dummy",
            "load_format": "dummy",
            "platform": "dummy",
            "executor": "ray",
            "plugins.dummy.num_workers": workers,
            **overrides,
        }
        config = load_config(overrides=keys, environ={})
        registry = Registry.discover(config)
        platform = select_platform(registry, config)
        config = evolve(config, description=read_description("dummy", "dummy"))
        config = resolution.configure(config, registry, platform)
        config = resolution.fill_defaults(config, platform)
        executor_class = select_executor(registry, config, platform)
        config = resolution.structure_plugins(config, registry)
        resolution.check(config, registry, platform, executor_class)
        return executor_class, config, registry, platform

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


@pytest.fixture
def give_cache():
    """Give an executor's workers a cache, so that they can execute; return the executor."""

    def give_cache(executor):
        executor.initialize_cache(plans(executor, 32))
        return executor

    return give_cache


def pid_of(worker):
    return os.getpid()


@pytest.fixture
def pids():
    """Ask an executor for its workers' processes."""
    return lambda executor: executor.collective_rpc(pid_of)


@pytest.fixture
def is_alive():
    def is_alive(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return is_alive


class Nodes:
    """Two logical nodes, in a process that starts and ends them."""

    def __init__(self, folder):
        from hardpoint_ray.own_ray import token

        descriptor = os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token())  # as Ray reads one for each process
        self.token_file = folder / "token"
        self.address = self._begun(folder)

    def _begun(self, folder, tries=3):
        """Start them; again where a busy machine had none up in the half minute that Ray allows."""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), str(folder), "4"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            return self._line()
        except EOFError:
            self.close()
            if tries == 1:
                raise
        return self._begun(folder, tries - 1)

    def _line(self):
        for line in self.process.stdout:
            if line.strip() == "removed" or re.fullmatch(r"[\d.]+:\d+\n", line):
                return line.strip()
        raise EOFError("the nodes' process ended")

    def remove(self):
        """Have the second node go, all at once."""
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()
        return self._line()

    def close(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nodes():
    """Two logical nodes of this module's own; ``plugins.ray.address`` names them."""
    folder = Path(tempfile.mkdtemp(prefix="hp-ray-", dir="/tmp"))
    try:
        made = Nodes(folder)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("RAY_AUTH_TOKEN_PATH", str(made.token_file))
            yield made
        made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
