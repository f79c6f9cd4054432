"""The light module that the entry point names."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord


@hookimpl
def hardpoint_executor() -> ExecutorRecord:
    """Offer ``uni``."""
    return ExecutorRecord(
        name="uni",
        api=(2, 0),
        executor="hardpoint_uniproc.executor:UniProcExecutor",
        summary="one worker on a thread of this process",
    )
