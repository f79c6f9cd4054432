"""A driver for tests of what is stopped: uses the executor ``ray`` on the dummy platform once, in
the way that its argument names, and says in JSON lines what is there before, meanwhile and after.

It ends when its input does.
"""

import json
import os
import shutil
import sys
import tempfile
import time

import psutil
import ray
from hardpoint_ray.connection import Connection
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_start import start


def say(**what):
    print(json.dumps(what), flush=True)


def parent():
    return os.getppid()


def children():
    """Return the commands of this process's living descendants."""
    found = []
    for each in psutil.Process().children(recursive=True):
        try:
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(each.cmdline()))
        except psutil.Error:
            continue
    return found


def gone(within=60.0):
    """Wait until no child is left; return those that are."""
    end = time.monotonic() + within
    while (left := children()) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def states():
    return {
        each["name"] or "unnamed": each["state"]
        for each in ray.util.placement_group_table().values()
    }


def once(executor, **keys):
    started = start(executor, **keys)
    reservation = started._resources.nursery._reservation
    found = {"initialised": ray.is_initialized(), "own": reservation.own, "groups": states()}
    found["folder"] = str(getattr(Connection.current, "folder", ""))
    started.shutdown()
    return found


def of_ours(executor):
    """None runs and none is named: one is started."""
    say(**once(executor))
    say(initialised=ray.is_initialized(), children=gone())


def joined(executor):
    """One is named by ``RAY_ADDRESS`` or the key."""
    say(**once(executor, **{"plugins.ray.address": os.environ["OWNER_ADDRESS"]}))
    say(initialised=ray.is_initialized(), children=gone())


def users(executor):
    """The program has started its own, and is connected to it."""
    folder = tempfile.mkdtemp(prefix="hp-ray-", dir="/tmp")
    resources = {"dummy": 8}
    ray.init(
        address="local", num_cpus=4, resources=resources, include_dashboard=False, _temp_dir=folder
    )
    given = ray.util.placement_group([{"dummy": 1}, {"dummy": 1}], name="given")
    current = ray.util.placement_group([{"dummy": 1}, {"CPU": 1}, {"dummy": 1}], name="current")
    assert given.wait(60)
    assert current.wait(60)
    say(way="new", **once(executor))
    say(way="given", **once(executor, **{"plugins.ray.placement_group": "given"}))
    inside = PlacementGroupSchedulingStrategy(
        placement_group=current,
        placement_group_bundle_index=1,
        placement_group_capture_child_tasks=True,
    )
    driver = ray.remote(num_cpus=1, scheduling_strategy=inside)(once)
    say(way="current", **ray.get(driver.remote(executor), timeout=120))
    answer = ray.get(ray.remote(num_cpus=0)(parent).remote(), timeout=120)
    say(initialised=ray.is_initialized(), answer=answer, groups=states())
    ray.shutdown()
    say(initialised=ray.is_initialized(), children=gone())
    shutil.rmtree(folder, ignore_errors=True)


{"ours": of_ours, "joined": joined, "users": users}[sys.argv[1]](sys.argv[2])
sys.stdin.read()
