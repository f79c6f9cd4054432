"""Every socket at which ``ray`` and its Ray listen, before they do (S6)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hardpoint.records import Listener
from hardpoint_multiproc.listeners import across_hosts

if TYPE_CHECKING:
    from hardpoint_ray.settings import RaySettings

GUARD = "Ray's token, made for the process and kept in a file 0600"
ITS_OWN = "whatever that Ray was started with: RAY_AUTH_MODE=token is its own setting"
ON_LOOPBACK = "127.0.0.1"


def of_ray(settings: RaySettings, workers: int) -> tuple[Listener, ...]:
    """Return those of ``ray`` as it is configured, with so many ``workers``."""
    address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        parts = ("gcs_server", "raylet", "object manager", "each of its processes")
        rays = tuple(
            Listener(purpose="Ray", address=f"{ON_LOOPBACK}:*", owner=part, protection=GUARD)
            for part in parts
        )
        agent = Listener(
            purpose="Ray", address=f"{ON_LOOPBACK}:*", owner="runtime environment agent",
            protection=GUARD,
        )  # fmt: skip
        shared = Listener(
            purpose="collectives", address=f"{ON_LOOPBACK}:*", owner="each worker",
            protection="reached from this host alone; none where the platform shares memory",
        )  # fmt: skip
        return (*rays, agent, *((shared,) if workers > 1 else ()))
    joined = Listener(purpose="Ray", address=address, owner="the Ray joined", protection=ITS_OWN)
    host, nodes = settings.listen or "this node's address in Ray", "each node's address in Ray"
    processes = Listener(
        purpose="Ray", address=f"{nodes}:*", owner="this process and each worker",
        protection=ITS_OWN,
    )  # fmt: skip
    return (joined, processes, *across_hosts(host, nodes))
