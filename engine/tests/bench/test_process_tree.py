"""Processes from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hardpoint_engine.bench.process_tree import cpu_seconds, descendants, kill_tree

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_tree_is_found_with_its_time_and_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert set(descendants(parent.pid)) == {parent.pid, child}
        assert parent.pid in descendants(os.getpid())
        before, end = cpu_seconds([child]), time.monotonic() + 20
        while cpu_seconds([child]) - before < 0.05:
            assert time.monotonic() < end
        assert cpu_seconds([parent.pid, child]) > cpu_seconds([child])
    finally:
        kill_tree(parent.pid)
        parent.wait()
        parent.stdout.close()
    assert cpu_seconds([parent.pid]) == 0
