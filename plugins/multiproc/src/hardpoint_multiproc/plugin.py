"""The light module that the entry point names."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord


@hookimpl
def hardpoint_executor() -> ExecutorRecord:
    """Offer ``mp``."""
    return ExecutorRecord(
        name="mp",
        api=(2, 0),
        executor="hardpoint_multiproc.executor:MultiprocExecutor",
        settings="hardpoint_multiproc.settings:MultiprocSettings",
        summary="one process for each worker, on this host",
    )
