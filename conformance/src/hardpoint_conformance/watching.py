"""What is left: processes, threads, files and shared memory that a test's process can see."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

SHARED = "/dev/shm/"  # noqa: S108 - it is looked for, not used
PATIENCE = 30.0
"""Seconds after which a wait is a failure; nothing here takes as long."""


@frozen(kw_only=True)
class Traces:
    """What is there now. Sockets and pipes are counted as open files."""

    children: frozenset[int]
    threads: frozenset[str]
    descriptors: int

    @classmethod
    def now(cls) -> Traces:
        """Look."""
        gc.collect()
        return cls(
            children=_children(os.getpid()),
            threads=frozenset(f"{thread.name} {thread.ident}" for thread in threading.enumerate()),
            descriptors=len(_listed(Path("/proc/self/fd"))),
        )

    def left_since(self, before: Traces) -> list[str]:
        """Return what is here and was not there before, in words."""
        left = [f"process {pid}" for pid in self.children - before.children]
        left += [f"thread {name}" for name in self.threads - before.threads]
        if self.descriptors > before.descriptors:
            left.append(f"{self.descriptors - before.descriptors} open files")
        return sorted(left)


def left_after(before: Traces, seconds: float = PATIENCE) -> list[str]:
    """Return what is still left when ``seconds`` have passed; at once if nothing is."""
    end = time.monotonic() + seconds
    while left := Traces.now().left_since(before):
        if time.monotonic() > end:
            return left
        time.sleep(0.05)
    return []


def own_bytes() -> int:
    """Return the bytes of writable memory that this process has mapped of its own (0 where the
    system does not say): large arrays on the host are among them, used or not.
    """
    gc.collect()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Wait for ``condition``; return whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Gate:
    """Holds workers back by a file, which works across processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def args(self) -> tuple[str]:
        """What :func:`hardpoint_conformance.in_worker.pass_gate` is given."""
        return (str(self.folder),)

    def open(self) -> None:
        """Let everybody pass."""
        (self.folder / "open").touch()

    def entered(self, count: int) -> bool:
        """Wait until ``count`` workers are held; return whether they came."""
        return wait_until(lambda: len(list(self.folder.glob("entered-*"))) >= count)


def _children(pid: int) -> frozenset[int]:
    """Return the living processes below ``pid``."""
    parents: dict[int, int] = {}
    for entry in _listed(Path("/proc")):
        if entry.isdigit():
            try:
                rest = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if rest[0] not in "ZX":
                parents[int(entry)] = int(rest[1])
    found: set[int] = set()
    while fresh := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= fresh
    return frozenset(found)


def shared_files(pids: frozenset[int]) -> frozenset[Path]:
    """Return the files of shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split(None, 5)[-1] for line in lines if SHARED in line}
    return frozenset(Path(name) for name in found if not name.endswith("(deleted)"))


def _listed(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []
