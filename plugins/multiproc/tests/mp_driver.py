"""A driver for tests: starts ``mp`` on the dummy platform without a guard of any kind, says what is
going on, and does what its first argument names. Keys of the configuration follow, as KEY=VALUE.
"""

import json
import os
import signal
import sys
import time

from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform

print(json.dumps({"script": os.getpid()}), flush=True)  # printed again if it were imported again


def say(**what):
    print(json.dumps(what), flush=True)


def whole(text):
    return json.loads(text) if text[:1] in "0123456789tf[{" else text


what, *keys = sys.argv[1:]
if what == "deafened":  # by whoever started it, or by a library
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
given = {key: whole(value) for key, value in (each.split("=", 1) for each in keys)}
settings = {
    "model": "dummy",
    "load_format": "dummy",
    "platform": "dummy",
    "executor": "mp",
    "plugins.dummy.num_workers": 2,
    **given,
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
pids = executor.collective_rpc(lambda worker: os.getpid())
nurseries = executor.collective_rpc(lambda worker: os.getppid())
say(workers=pids, nursery=nurseries[0])


def child_of_worker(worker):
    import subprocess

    return subprocess.Popen(["sleep", "1000"]).pid


def deaf(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if what in ("children", "native"):
    say(children=executor.collective_rpc(child_of_worker))
if what == "deaf":
    executor.collective_rpc(deaf)
if what == "moved":  # out of its own group; and it will not answer either
    executor.collective_rpc(lambda worker: os.setpgid(0, os.getppid()))
if what in ("busy", "deaf", "native", "moved"):
    body = {
        "busy": lambda worker: time.sleep(1000),
        "deaf": lambda worker: time.sleep(1000),
        "native": lambda worker: sum(range(10**14)),  # holds the interpreter
        "moved": lambda worker: sum(range(10**14)),
    }[what]
    future = executor.collective_rpc(body, non_block=True)
    say(busy=True)
if what == "forked":  # a child of the user's own inherits every descriptor
    if os.fork() == 0:
        time.sleep(1000)
    say(forked=True)
if what == "exit":
    sys.exit(5)
if what == "raise":
    raise ValueError("the user's own")
if what == "deafened":
    masks = executor.collective_rpc(lambda worker: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    say(masks=[sorted(mask) for mask in masks])
if what in ("shutdown", "deafened"):
    executor.shutdown()
    say(closed=True)
    sys.exit(0)
time.sleep(1000)
