"""The look from outside sees what a run left, and takes nothing of somebody else's for it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from fault_groups import settle
from outside import SHARED, VARIABLE, SharedMemory, look

HOLD = """
import mmap, os, sys, threading
name, how = sys.argv[1:]
made = os.open(name + "-new", os.O_CREAT | os.O_EXCL | os.O_RDWR)
os.truncate(made, 4096)
held = mmap.mmap(made, 4096) if how == "mapped" else None
os.link(name + "-new", name)
os.unlink(name + "-new")
if held:
    os.close(made)
def be_restless():
    while True:
        os.close(os.dup(0))
for _ in range(how == "restless"):
    threading.Thread(target=be_restless, daemon=True).start()
print("there", flush=True)
sys.stdin.read()
"""
"""Holds a name as it has it open, by itself or while it opens and closes other files; or as
semaphores are held: mapped under a name that is gone.
"""


@pytest.fixture
def memory():
    watching = SharedMemory()
    watching.start()
    yield watching
    watching.ended.set()
    watching.join()


@pytest.mark.parametrize("how", ["open", "mapped", "restless"])
@pytest.mark.parametrize("whose", ["ours", "another run's", "nobody's"])
def test_a_name_in_shared_memory_is_left_by_who_had_it(memory, whose, how):
    marker, name = uuid.uuid4().hex, f"{SHARED}/hp-faults-{uuid.uuid4().hex}"
    kept = {key: value for key, value in os.environ.items() if key != VARIABLE}
    own = {"ours": marker, "another run's": uuid.uuid4().hex}
    environment = {**kept, VARIABLE: own[whose]} if whose in own else kept
    known = look(memory, marker, [SHARED])["files"]

    def left() -> bool:
        return name in look(memory, marker, [SHARED], known)["files"]

    holder = subprocess.Popen(
        [sys.executable, "-I", "-c", HOLD, name, how], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == b"there\n"
        settle(lambda: memory.held.get(name))
        assert not left(), "it is in use"
        holder.kill()
        holder.wait()
        assert Path(name).exists()
        assert left() is (whose == "ours")
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
        Path(name).unlink(missing_ok=True)
