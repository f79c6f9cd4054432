"""A driver for tests: starts ``ray`` on the dummy platform, and a Ray with it; says where it is, a
JSON line each, waits for a failure, says which, and ends. Keys of the configuration are its
arguments, as KEY=VALUE.
"""

import json
import os
import sys
import threading
import time

from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform


def say(**what):
    print(json.dumps(what), flush=True)


def pid_of(worker):
    return os.getpid()


settings = {
    "model": "dummy",
    "load_format": "dummy",
    "platform": "dummy",
    "executor": "ray",
    "plugins.dummy.num_workers": 2,
    **dict(each.split("=", 1) for each in sys.argv[1:]),
}
config = load_config(overrides=settings, environ={})
registry = Registry.discover(config)
platform = select_platform(registry, config)
config = evolve(config, description=read_description("dummy", "dummy"))
config = resolution.configure(config, registry, platform)
config = resolution.fill_defaults(config, platform)
executor_class = select_executor(registry, config, platform)
config = resolution.structure_plugins(config, registry)
say(starting=True)
executor = executor_class.start(config, registry, platform)
failed = threading.Event()
errors = []
executor.register_failure_callback(lambda error: (errors.append(error), failed.set()))
say(workers=executor.collective_rpc(pid_of))
failed.wait()
(error,) = errors
say(failed=type(error).__name__, rank=error.rank, pid=error.pid, text=str(error))
began = time.monotonic()
executor.shutdown()
say(closed=True, seconds=time.monotonic() - began)
