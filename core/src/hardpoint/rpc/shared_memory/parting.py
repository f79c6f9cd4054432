"""When a worker that shares a processor with its driver may go to another one.

Both yield their processor while they wait, so on one they hand it to each other and a call takes
twice as long; and the kernel, to which nobody seems to wait, leaves them there for up to a tenth of
a second. The worker's reader sees by the ring on which processor the driver was; how it parts from
it stands in ``core/native/ring.c``. It does only where a processor is to spare: fewer workers than
the driver may use of them, and few others that run.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")
CROWD = ROOT / "proc/loadavg"
"""Its fourth number counts the threads that run or could."""
_CONTROLLER = "cpu"
"""Of processors' time, as the kernel calls it."""


def has_room(workers: int, root: Path = ROOT) -> bool:
    """Whether each of ``workers`` and the driver can have a processor of its own, by the affinity
    of this thread and the time that control groups leave its process. Called in the driver.
    """
    return workers + 1 <= min(len(os.sched_getaffinity(0)), _quota(root))


def _quota(root: Path) -> float:
    """Return for how many processors' time the control groups provide, in the tightest of them."""
    quota = float("inf")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return quota
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and _CONTROLLER not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / (_CONTROLLER if kinds else "")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            quota = min(quota, _of_group(folder))
            if folder == top:
                break
    return quota


def _of_group(folder: Path) -> float:
    try:
        if (file := folder / "cpu.max").is_file():
            time, period = file.read_text().split()
        else:
            time, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        if int(time) > 0:
            return int(time) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # none, "max", or -1
        pass
    return float("inf")
