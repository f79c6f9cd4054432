"""Processes as seen from outside: who descends from whom, and the CPU time that they have used."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PROCESS_CLOCK = 2
"""What a process's own CPU clock has in its lower three bits; above them is the complement of its
number (clock_getcpuclockid(3)). It counts in ns, all threads, those that ended included.
"""


def descendants(root: int) -> tuple[int, ...]:
    """Return ``root`` and every process that descends from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [root]
    for each in found:
        found += children.get(each, ())
    return tuple(found)


def cpu_seconds(processes: Iterable[int]) -> float:
    """Return the CPU seconds, user and system, that living processes have used so far."""
    total = 0
    for each in processes:
        with contextlib.suppress(OSError):
            total += time.clock_gettime_ns((~each << 3) | PROCESS_CLOCK)
    return total / 1e9


def kill_tree(root: int) -> None:
    """Kill ``root`` and every process that descends from it."""
    for each in descendants(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
