"""The stacks of a worker on another node. While it works, its actor answers nothing: so its process
writes them at a signal, and whoever runs on that node reads what it wrote.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from hardpoint.rpc.process_life import is_stopped
from hardpoint_multiproc.group import STACK_SECONDS
from hardpoint_multiproc.signals import LAST_STACK_SIGNAL, STACK_SIGNAL
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MOST_SECONDS = 3.0
"""How long they are awaited on the node."""


def register(fd: int) -> None:
    """Have this process, a worker's, write the stacks of its threads to ``fd`` at a signal; after
    the second of the two it ends.
    """
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    faulthandler.register(LAST_STACK_SIGNAL, file=fd, all_threads=True, chain=True)


def asked(node_id: str, pid: int, fd: int, *, last: bool) -> Future[str]:
    """Have process ``pid`` of a node write them to its ``fd``; return a future of the text."""
    where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(written)
    found: Future[str] = task.remote(pid, fd, last).future()
    return found


def written(pid: int, fd: int, last: bool) -> str:
    """Signal process ``pid`` and return what it writes. Runs on its node, as its user."""
    with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        os.kill(pid, LAST_STACK_SIGNAL if last else STACK_SIGNAL)
        if is_stopped(pid):
            os.kill(pid, signal.SIGCONT)
        end, size = time.monotonic() + MOST_SECONDS, begin
        while time.monotonic() < end:
            time.sleep(STACK_SECONDS)
            now = file.seek(0, os.SEEK_END)
            if now == size > begin:
                break
            size = now
        file.seek(begin)
        return file.read().decode(errors="replace")
