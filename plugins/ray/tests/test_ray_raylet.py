"""Ray's own process of a node is killed, and no other: the workers there end with it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from hardpoint.errors import WorkerDiedError
from ray.exceptions import RayActorError

pytestmark = pytest.mark.slow


def test_workers_of_another_node_end_with_its_raylet(launcher, nodes, eventually, is_alive):
    executor = launcher.start(
        workers=3, **{"plugins.ray.address": nodes.address, "plugins.ray.strategy": "SPREAD"}
    )
    actors = executor._resources.nursery._actors.values()
    far = {each.where.pid: each.where.raylet for each in actors if each.pidfd == -1}
    (raylet,) = set(far.values())
    assert psutil.Process(raylet).name() == "raylet"
    heard = []
    executor.register_failure_callback(heard.append)
    os.kill(raylet, signal.SIGKILL)
    (error,) = eventually(lambda: heard)
    assert isinstance(error, WorkerDiedError)
    assert error.pid in far
    assert isinstance(error.__cause__, RayActorError)
    assert "heartbeats" not in str(error)  # by many missed ones Ray finds such a node out
    eventually(lambda: not any(map(is_alive, far)))
