"""Every socket at which something listens for ranks of a launcher, before it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint.errors import ConfigError
from hardpoint.records import Listener

from hardpoint_external_launcher.launchers import ADDRESS, PORT, TORCHRUN, seat_of
from hardpoint_external_launcher.settings import ExternalLauncherSettings

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
    settings = config.settings_of("external_launcher")
    if isinstance(settings, ExternalLauncherSettings) and settings.key_file is not None:
        return store, *_abroad(settings.address or "the address towards MASTER_ADDR")
    collectives = Listener(
        purpose="collectives",
        address="127.0.0.1:*",
        owner="each worker",
        protection="reached from this host alone; none where the platform shares memory",
    )
    return store, collectives


def _abroad(address: str) -> tuple[Listener, Listener]:
    ranks = Listener(
        purpose="ranks of other hosts",
        address=f"{address}:*",
        owner="each rank",
        protection="CURVE, a key for each rank, made for the run and sealed by the key file",
        until="all of them have connected, and with rank 0 all that use its store",
    )
    collectives = Listener(
        purpose="collectives",
        address=f"{address}:*",
        owner="each worker",
        protection="none: the collective library has none; keep its network to these hosts",
    )
    return ranks, collectives
