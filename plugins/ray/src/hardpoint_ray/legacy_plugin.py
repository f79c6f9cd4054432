"""The offer of ``ray_legacy``. Imports no Ray, as that of ``ray``."""

from __future__ import annotations

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord

from hardpoint_ray.plugin import probe


@hookimpl
def hardpoint_executor() -> ExecutorRecord:
    """Offer ``ray_legacy``."""
    return ExecutorRecord(
        name="ray_legacy",
        api=(2, 0),
        executor="hardpoint_ray.legacy:RayLegacyExecutor",
        probe=probe,
        summary="as ray, with steps by a compiled graph of Ray",
    )
