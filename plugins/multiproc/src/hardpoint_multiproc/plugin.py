"""The light module that the entry point names."""

from __future__ import annotations

import sys

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord, Verdict


def probe() -> Verdict:
    """Say whether this system has what worker processes are started and watched by."""
    if sys.platform != "linux":
        return Verdict(
            available=False,
            reason=f"it starts and watches worker processes by means that Linux alone has, and "
            f"this is {sys.platform}",
        )
    return Verdict(available=True, reason="worker processes on this host")


@hookimpl
def hardpoint_executor() -> ExecutorRecord:
    """Offer ``mp``."""
    return ExecutorRecord(
        name="mp",
        api=(2, 0),
        executor="hardpoint_multiproc.executor:MultiprocExecutor",
        probe=probe,
        settings="hardpoint_multiproc.settings:MultiprocSettings",
        summary="one process for each worker, on this host or several",
    )
