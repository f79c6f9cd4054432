"""A driver for tests that is interrupted as it starts, goes on, and says what was left behind."""

import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform

warnings.simplefilter("error")


def prepared():
    config = load_config(
        overrides={
            "model": "dummy",
            "load_format": "dummy",
            "platform": "dummy",
            "executor": "mp",
            "plugins.dummy.num_workers": 2,
            "plugins.dummy.load_seconds": 60,
        }
    )
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    executor_class = select_executor(registry, config, platform)
    return executor_class, config, registry, platform


def interrupted(after):
    executor_class, *parts = prepared()
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        executor_class.start(*parts)
    except KeyboardInterrupt:
        return True
    return False


def descriptors():
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(f"{link.name} {link.readlink()}")
        except OSError:
            continue
    return {each for each in found if "/proc/" not in each}


interrupted(0.4)  # what is imported by then is imported
gc.collect()
before = descriptors()
count = sum(interrupted(float(each)) for each in sys.argv[1:])
gc.collect()
end = time.monotonic() + 10
while psutil.Process().children() and time.monotonic() < end:
    time.sleep(0.01)
told = {
    "interrupted": count,
    "children": [child.cmdline() for child in psutil.Process().children()],
    "threads": [t.name for t in threading.enumerate() if t.name.startswith("hardpoint")],
    "descriptors": sorted(descriptors() - before),
}
print(json.dumps(told), flush=True)
