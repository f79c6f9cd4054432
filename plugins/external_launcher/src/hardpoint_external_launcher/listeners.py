"""Every socket at which something listens for ranks of a launcher, before it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint.errors import ConfigError
from hardpoint.records import Listener

from hardpoint_external_launcher.launchers import ADDRESS, PORT, TORCHRUN, seat_of

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform

STRANGERS = "none: a stranger can keep the ranks from meeting, and have them run nothing"


def of_ranks(
    config: Config, platform: Platform, environ: Mapping[str, str]
) -> tuple[Listener, ...]:
    """Return those of a run that a launcher starts with ``environ``; before there is a launcher,
    the meeting place is known by its variables' names alone.
    """
    if platform.placement(config).num_workers == 1:
        return ()
    place, served = f"{ADDRESS}:{PORT}", False
    try:
        seat = seat_of(environ)
        place, served = f"{seat.address}:{seat.port}", seat.hosts_store
    except ConfigError:
        pass
    store = Listener(
        purpose="rendezvous store",
        address=place,
        owner="rank 0, or torchrun (which listens at every address of its host)",
        protection=STRANGERS,
        until="all ranks have met; torchrun's: the end",
    )
    if served:
        store = Listener(
            purpose="rendezvous store",
            address=f"*:{place.rpartition(':')[2]}",
            owner=TORCHRUN.name,
            protection=STRANGERS,
        )
    collectives = Listener(
        purpose="collectives",
        address="127.0.0.1:*",
        owner="each worker",
        protection="reached from this host alone; none where the platform shares memory",
    )
    return store, collectives
