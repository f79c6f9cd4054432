"""A small random Llama whose heads, columns and layers divide unevenly, and what runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _run(file, *arguments):
    """Run a script of this folder in a process of its own; return what it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, str(HERE / file), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def run():
    return _run


@pytest.fixture(scope="session")
def expected():
    """What one worker in the driver's process answers. In a process of its own: a process in which
    a worker has lived is no longer forked from.
    """
    return _run("small_engine.py", json.dumps({"executor": "uni"}))
