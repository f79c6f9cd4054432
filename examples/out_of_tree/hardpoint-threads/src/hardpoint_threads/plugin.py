"""The light module that the entry point names."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord


@hookimpl
def hardpoint_executor() -> ExecutorRecord:
    """Offer ``threads``."""
    return ExecutorRecord(
        name="threads",
        api=(2, 0),
        executor="hardpoint_threads.executor:ThreadsExecutor",
        summary="a thread of this process for each worker",
    )
