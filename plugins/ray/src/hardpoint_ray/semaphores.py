"""The semaphores of Ray's channels: files in /dev/shm, named by the raylet that keeps the channel,
which stay where all who used one were killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - where the C library has them
KINDS = ("sem.hdr", "sem.obj")


def of(pid: int) -> set[Path]:
    """Return those of the raylet ``pid`` of this host."""
    return {path for kind in KINDS for path in FOLDER.glob(f"{kind}{pid}-*")}


def remove(paths: Iterable[Path]) -> None:
    """Remove ``paths``; whoever uses one still goes on."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
