"""The light module that the entry point names."""

from __future__ import annotations

import sys

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord, Verdict


def probe() -> Verdict:
    """Say whether this system has what the processes of a launcher find each other by."""
    if sys.platform != "linux":
        return Verdict(
            available=False,
            reason=f"its processes find each other by means that Linux alone has, and this is "
            f"{sys.platform}",
        )
    return Verdict(available=True, reason="processes that torchrun, mpirun or srun start")


@hookimpl
def hardpoint_executor() -> ExecutorRecord:
    """Offer ``external_launcher``."""
    return ExecutorRecord(
        name="external_launcher",
        api=(2, 0),
        executor="hardpoint_external_launcher.executor:ExternalLauncherExecutor",
        probe=probe,
        settings="hardpoint_external_launcher.settings:ExternalLauncherSettings",
        summary="one worker in each process that torchrun, mpirun or srun started",
    )
