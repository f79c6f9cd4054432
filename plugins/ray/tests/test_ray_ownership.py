"""What an executor stops when it is shut down: that which it started, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXECUTORS = pytest.mark.parametrize("executor", ["ray", "ray_legacy"])


@pytest.fixture
def owner():
    """Run a driver to its end; return what it says, line by line."""

    def run(way, executor, **variables):
        environ = {name: each for name, each in os.environ.items() if name != "RAY_ADDRESS"}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("ray_owner.py")), way, executor],
            env={**environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr
        assert "died or was killed" not in said, said  # no end that Ray wonders at
        assert "compiled_dag_node" not in said, said
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


@EXECUTORS
def test_a_ray_that_was_started_here_is_stopped(owner, executor):
    during, after = owner("ours", executor)
    assert during["initialised"]
    assert during["own"]
    assert during["folder"]
    assert not Path(during["folder"]).exists()
    assert after == {"initialised": False, "children": []}


@EXECUTORS
def test_a_ray_that_was_joined_is_left(owner, nodes, launcher, executor):
    during, after = owner("joined", executor, OWNER_ADDRESS=nodes.address)
    assert during["initialised"]
    assert after == {"initialised": False, "children": []}
    assert nodes.process.poll() is None
    again = launcher.start(executor=executor, **{"plugins.ray.address": nodes.address})
    assert len(again.check_health()) == 2


@EXECUTORS
def test_the_ray_of_the_program_is_left_and_so_are_its_groups(owner, executor):
    new, given, current, after, end = owner("users", executor)
    assert new["own"]
    assert sorted(new["groups"].values()) == ["CREATED"] * 3
    assert not given["own"]
    assert not current["own"]
    assert after.pop("answer")
    assert after["initialised"]
    kept = {name: state for name, state in after["groups"].items() if state != "REMOVED"}
    assert kept == {"given": "CREATED", "current": "CREATED"}
    assert end == {"initialised": False, "children": []}
