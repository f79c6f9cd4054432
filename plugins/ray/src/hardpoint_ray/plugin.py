"""The offer of ``ray``. Imports no Ray: that is large, and an extra."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord, Verdict

OLDEST = (2, 59)
"""The first Ray that lets nobody into a cluster of its own without a token."""

INSTALL = f"pip install 'ray>={OLDEST[0]}.{OLDEST[1]}'"


def probe() -> Verdict:
    """Say whether Ray is installed, and new enough, without importing it."""
    if sys.platform != "linux":
        return Verdict(
            available=False,
            reason=f"it watches workers by means that Linux alone has, and this is {sys.platform}",
        )
    version = _version()
    if version is None:
        return Verdict(available=False, reason=f"Ray is not installed: {INSTALL}")
    if _numbers(version) < OLDEST:
        return Verdict(
            available=False,
            reason=f"Ray {version} is too old, it starts clusters that ask for no token: {INSTALL}",
        )
    return Verdict(available=True, reason=f"workers as actors of Ray {version}")


@hookimpl
def hardpoint_executor() -> ExecutorRecord:
    """Offer ``ray``."""
    return ExecutorRecord(
        name="ray",
        api=(2, 0),
        executor="hardpoint_ray.executor:RayExecutor",
        probe=probe,
        settings="hardpoint_ray.settings:RaySettings",
        summary="a Ray actor for each worker, on one host or several",
    )


def _version() -> str | None:
    if find_spec("ray") is None:
        return None
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:  # a folder of that name, which is not Ray
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
