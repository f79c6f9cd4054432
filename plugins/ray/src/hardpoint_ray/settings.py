"""The keys ``plugins.ray.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key

START_TIMEOUT = "plugins.ray.start_timeout"
"""The key that an error of a start that takes too long names."""

PLACEMENT_TIMEOUT = "plugins.ray.placement_timeout"
"""The key that an error of resources that never come free names."""


@frozen(kw_only=True)
class RaySettings:
    """Where workers are placed, and how they are called and watched."""

    address: str | None = key(
        None,
        "the Ray to join: host:port, auto (one on this host) or local (start one); unset: the one "
        "this process is connected to, else that of RAY_ADDRESS, else start one",
    )
    placement_group: str | None = key(
        None, "name of the placement group to use; unset: the current one, else a new one"
    )
    strategy: str = key(
        "PACK",
        "how a new placement group is laid over nodes",
        choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    )
    bundle_indices: tuple[int, ...] | None = key(
        None, "the bundle of each rank, of a placement group that was there before"
    )
    placement_timeout: float = key(
        1800.0, "seconds for which the workers' resources are awaited", above=0
    )
    object_store_bytes: int = key(
        80 << 20, "memory for objects of a Ray that is started here", above=0
    )
    listen: str | None = key(
        None,
        "address of this host at which workers of other nodes call back; unset: the one by which "
        "Ray knows it",
    )
    metrics: bool = key(False, "count steps, tokens and failures in Ray's own metrics")
    start_timeout: float = key(
        120.0, "seconds for which no worker may come any further while it starts and loads", above=0
    )
    warn_after: float = key(
        60.0, "seconds after which a worker that is still busy with a call is told of", above=0
    )
    hang_after: float | None = key(
        None, "seconds of one call after which a worker is given up; unset: never", above=0
    )
