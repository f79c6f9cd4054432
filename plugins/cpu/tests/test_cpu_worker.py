"""The cpu worker in processes of its own: real memory, real cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20


@pytest.fixture
def run_program():
    def run(what: str) -> dict:
        program = Path(__file__).with_name("worker_program.py")
        done = subprocess.run(
            [sys.executable, str(program), what], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_touched_cache_and_a_step_stay_within_the_budget(run_program):
    found = run_program("memory")
    assert found["available"] > 100 * MIB
    assert found["untouched"] < 8 * MIB  # costs nothing until it is used
    assert found["touched"] >= found["available"] * 0.95
    assert found["peak"] <= found["budget"]


def test_a_worker_binds_itself_and_not_its_driver(run_program):
    found = run_program("binding")
    assert found["worker"] == found["cores"][-1:]
    assert found["threads"] == 1
    assert found["driver"] == found["cores"]
