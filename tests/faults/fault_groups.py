"""Groups of real workers on the dummy platform, drivers in processes of their own, and patience."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.messages import SchedulerOutput
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform

PATIENCE = 30.0
SLACK = 30.0
"""Seconds that a loaded machine may take on top of a bound; the table tells what it really took."""
SIZE = 3


def settle(condition, within=PATIENCE):
    """Wait until ``condition()`` is true; return how long that took. Raises TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within:
            raise TimeoutError("it never came true")
        time.sleep(0.005)
    return time.monotonic() - began


def own_descriptors():
    """Return how many descriptors of each kind this process has that a group could have left."""
    gc.collect()
    found = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except OSError:
            continue  # that of this very listing
        if name.startswith(("/memfd", "socket:", "anon_inode:", "pipe:")):
            found[re.split(r"[\[ ]", name, maxsplit=1)[0]] += 1
    return found


def prepare(**overrides):
    """Return (executor class, config, registry, platform) for ``mp`` on ``dummy``."""
    settings = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": "mp",
        "block_size": 4,
        "max_model_len": 64,
        "plugins.dummy.num_workers": SIZE,
        "rpc.heartbeat": 0.05,
        **overrides,
    }
    config = load_config(overrides=settings, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    executor_class = select_executor(registry, config, platform)
    config = resolution.structure_plugins(config, registry)
    resolution.check(config, registry, platform, executor_class)
    return executor_class, config, registry, platform


def plans(executor, num_blocks=17):
    made = []
    for specs in executor.get_kv_cache_specs():
        tensors = [
            KVCacheTensor(num_bytes=num_blocks * each.page_bytes, layers=(layer,))
            for layer, each in specs.items()
        ]
        group = KVCacheGroup(layers=tuple(specs), spec=next(iter(specs.values())))
        made.append(KVCacheConfig(num_blocks=num_blocks, groups=(group,), tensors=tuple(tensors)))
    return made


class Groups:
    """Starts executors in this process."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []

    def built(self, **overrides):
        """Return an executor that was not started; it is ended with the test."""
        executor_class, *parts = prepare(**overrides)
        executor = executor_class(*parts)
        self.started.append(executor)
        return executor

    def loaded(self, **overrides):
        executor = self.built(**overrides)
        executor.start_workers()
        executor.collective_rpc("init_device")
        executor.collective_rpc("load_model")
        return executor

    def ready(self, **overrides):
        """Return an executor that can execute."""
        executor = self.loaded(**overrides)
        executor.initialize_cache(plans(executor))
        return executor

    def close(self):
        for executor in self.started:
            executor.shutdown()
        self.started.clear()
        gc.collect()


def step(executor, number=1, **options):
    return executor.execute_model(SchedulerOutput(step_id=number), **options)


class Driver:
    """One driver in its own process; ``said`` are the words that it printed so far."""

    def __init__(self, command, environment):
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.errors = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        self.errors.extend(self.process.stderr)

    def word(self):
        """Return the next line that it prints, read as JSON."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(PATIENCE)
            self._reader.join(PATIENCE)
            raise EOFError(f"the driver ended ({self.process.returncode}): {''.join(self.errors)}")
        return json.loads(line)

    def until(self, word):
        """Read on until it says ``word``; return what belongs to it."""
        while (said := self.word())[0] != word:
            pass
        return said[1]

    def go(self, word="go"):
        """Let it go on."""
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def signal(self, signum):
        self.process.send_signal(signum)

    def ended(self, within=PATIENCE):
        """Return its exit code and standard error."""
        code = self.process.wait(within)
        self._reader.join(within)
        return code, "".join(self.errors)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            try:
                stream.close()
            except BrokenPipeError:
                continue


class Drivers:
    """Starts drivers: the script fault_driver.py, with what it is to do and keys of its config."""

    def __init__(self, marker, folder, outside):
        self.marker = marker
        self.folder = folder
        self.outside = outside
        self.made = []

    def start(self, *arguments, **environment):
        script = Path(__file__).with_name("fault_driver.py")
        return self.run([sys.executable, str(script), *arguments], **environment)

    def run(self, command, **environment):
        driver = Driver(command, {**os.environ, **environment})
        self.made.append(driver)
        return driver

    def family(self):
        """Return pid -> command of all that the drivers started, and of themselves."""
        return self.outside.look(self.marker)["processes"]

    def close(self):
        for driver in self.made:
            driver.close()


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def pid_of(worker):
    return os.getpid()


def exit_soon(worker, rank, code):
    """Have ``rank`` end in a moment, when it is idle."""
    if worker.rank == rank:
        threading.Timer(0.05, os._exit, (code,)).start()


def ignore_term(worker, rank):
    if worker.rank == rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
