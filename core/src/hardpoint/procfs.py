"""Reading the kernel's small files, and finding a process's control groups of both versions.

``root`` is where ``proc`` and ``sys`` are found; tests give a folder of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
NO_LIMIT = 1 << 60
"""Version 1 says "no limit" by a number near 2**63; nothing real is this large."""


def read(path: Path) -> str | None:
    """Return a file's text without surrounding blanks, None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the number in a file; None for ``max``, anything else that is no number, no file."""
    text = read(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None


def read_table(path: Path) -> dict[str, int]:
    """Return name -> number of a file of lines ``name[:] number [kB]``; kB are made bytes."""
    table: dict[str, int] = {}
    for line in (read(path) or "").splitlines():
        name, *rest = line.split()
        if rest and rest[0].isdigit():
            unit = 1024 if rest[1:2] == ["kB"] else 1
            table[name.removesuffix(":")] = int(rest[0]) * unit
    return table


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of this process's control groups for ``controller``, the innermost
    first, then every one around it: each may have its own limit.

    A container often sees its group mounted as the root of the hierarchy, under a name from
    outside; the mount table tells what a name is relative to.
    """
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        version = 1 if names else 2
        if version == 1 and controller not in names.split(","):
            continue
        for mounted, origin in _mounts(version, controller, root):
            inside = _relative(path, origin)
            top = root / mounted.lstrip("/")
            folder = top / inside
            if ".." in Path(inside).parts or not folder.is_dir():
                folder = top  # the group lies outside of what is mounted here
            while True:
                yield version, folder
                if folder == top:
                    break
                folder = folder.parent


def time_quota(root: Path = ROOT) -> float | None:
    """Return for how many processors' time the tightest of this process's control groups provides;
    None where none limits it.
    """
    quotas = [
        quota for version, folder in groups("cpu", root) if (quota := _quota(version, folder))
    ]
    return min(quotas, default=None)


def _quota(version: int, folder: Path) -> float | None:
    if version == 2:
        amount, _, period = (read(folder / "cpu.max") or "max").partition(" ")
        known = amount.isdigit() and period.isdigit() and int(period) > 0
        return int(amount) / int(period) if known else None
    time, per = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    return time / per if time and per and time > 0 and per > 0 else None


def _mounts(version: int, controller: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield (mount point, the group that is mounted there), from proc/self/mountinfo."""
    kind = "cgroup" if version == 1 else "cgroup2"
    for line in (read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, options = before.split(), after.split()
        if len(fields) < 5 or len(options) < 3 or options[0] != kind:
            continue
        if version == 1 and controller not in options[2].split(","):
            continue
        yield fields[4], fields[3]


def _relative(path: str, origin: str) -> str:
    if origin != "/" and (path == origin or path.startswith(origin + "/")):
        path = path[len(origin) :]
    return path.strip("/")
