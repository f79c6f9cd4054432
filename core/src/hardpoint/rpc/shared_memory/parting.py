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

from hardpoint.procfs import ROOT, time_quota

CROWD = ROOT / "proc/loadavg"
"""Its fourth number counts the threads that run or could."""


def has_room(workers: int, root: Path = ROOT) -> bool:
    """Whether each of ``workers`` and the driver can have a processor of its own, by the affinity
    of this thread and the time that control groups leave its process. Called in the driver.
    """
    processors = len(os.sched_getaffinity(0))
    return workers + 1 <= min(processors, time_quota(root) or processors)
