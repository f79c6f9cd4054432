"""How much memory this process may use: the machine's, and what its control groups allow."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen
from hardpoint.procfs import NO_LIMIT, ROOT, groups, read_int, read_table

LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
USAGE_FILES = {1: "memory.usage_in_bytes", 2: "memory.current"}
CACHE_KEYS = {1: "total_inactive_file", 2: "inactive_file"}
"""Pages of files that are given up at once when somebody needs memory: not really in use."""


@frozen(kw_only=True)
class HostMemory:
    """Bytes that may be used in all, bytes free now, and what sets the limit."""

    total: int
    free: int
    source: str


def host_memory(root: Path = ROOT) -> HostMemory:
    """Return the least of the machine's memory and every limit of control groups, of version 1 and
    2, from this process's group up to the outermost. Reads some small files.
    """
    machine = read_table(root / "proc/meminfo")
    total = machine.get("MemTotal", 0)
    free = machine.get("MemAvailable", machine.get("MemFree", total))
    source = "the machine"
    for version, folder in groups("memory", root):
        limit = read_int(folder / LIMIT_FILES[version])
        if limit is None or limit >= NO_LIMIT:
            continue
        used = read_int(folder / USAGE_FILES[version]) or 0
        cache = read_table(folder / "memory.stat").get(CACHE_KEYS[version], 0)
        free = min(free, max(0, limit - max(0, used - cache)))
        if limit < total:
            total, source = limit, f"control group {folder}"
    return HostMemory(total=total, free=min(free, total), source=source)


def resident(root: Path = ROOT) -> int:
    """Return the bytes of this process that are in memory."""
    return read_table(root / "proc/self/status").get("VmRSS", 0)


def resident_peak(root: Path = ROOT) -> int:
    """Return the most bytes of this process that were in memory since the peak was forgotten."""
    return read_table(root / "proc/self/status").get("VmHWM", 0)


def forget_peak(root: Path = ROOT) -> bool:
    """Have the kernel start the peak anew; False where it does not allow that (the peak is then
    that of the whole life, so never too small).
    """
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
